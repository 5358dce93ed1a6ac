"""The bundled GPT with Llama's settings, in the words of Hugging Face's transformers: names of its weights, config.json."""

from __future__ import annotations

from typing import Any

from trainrun.models.rotary import HIGH, LOW, TRAINED_CONTEXT
from trainrun.settings import ModelSettings

ARCHITECTURE = "LlamaForCausalLM"

_NAMES = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "attention.queries": "self_attn.q_proj",
    "attention.keys": "self_attn.k_proj",
    "attention.values": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
}

_REQUIRED = {"activation": "swiglu", "norm_weights": True, "embedding_norm": False, "query_key_norm": False}


def llama_name(name: str) -> str:
    """transformers' name of a weight of the bundled GPT."""
    module = name.removesuffix(".weight")
    if module.startswith("blocks."):
        _, number, rest = module.split(".", 2)
        return f"model.layers.{number}.{_NAMES[rest]}.weight"
    return f"{_NAMES[module]}.weight"


def unlike_llama(settings: ModelSettings) -> list[str]:
    """The settings by which a model computes something that Llama does not; empty when it is Llama."""
    return [
        f"model.{name} is {getattr(settings, name)!r}" for name, value in _REQUIRED.items() if getattr(settings, name) != value
    ]


def llama_config(settings: ModelSettings, *, vocabulary: int, context: int, end: int | None) -> dict[str, Any]:
    """The ``config.json`` of a model that is Llama.

    Args:
        settings: `unlike_llama` has nothing to say of them.
        vocabulary: rows of the embedding.
        context: most tokens that the model was made to see at once.
        end: id of the token that ends a text; None when it is not known.
    """
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": settings.width,
        "intermediate_size": settings.feed_forward or 4 * settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.kv_heads or settings.heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": context,
        "rms_norm_eps": settings.norm_epsilon,
        "rope_theta": settings.rope_base,
        "tie_word_embeddings": settings.tied,
        "bos_token_id": None,
        "eos_token_id": end,
    }
    if settings.rope_scaling != 1:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": settings.rope_scaling,
            "low_freq_factor": LOW,
            "high_freq_factor": HIGH,
            "original_max_position_embeddings": TRAINED_CONTEXT,
        }
    return config
