"""How many parameters a model has, and its shape, from its description alone: no weights, no torch.

The counts are those of the model that trains: a decoder with its output layer (Hugging Face's ``...ForCausalLM``), counted
once where it shares the embedding; BERT as the encoder with its pooler (``BertModel``), without a head, since heads differ by
task. Buffers are no parameters. The tests compare every family with transformers' own modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainrun.config import ConfigError, nearest
from trainrun.settings.model import ModelSettings


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a transformer that decide about its memory."""

    parameters: int
    """All parameters, those of every expert included."""
    layers: int
    width: int
    """Size of the residual stream, ``hidden_size``."""
    query_width: int
    """All heads of the queries together."""
    kv_width: int
    """All heads of the keys together; the values have as many."""
    feed_forward: int
    """Inner width of the feed-forward layers through which one token goes."""
    gated: bool
    """Whether the feed-forward layers have a gate (SwiGLU): three matrices instead of two."""
    vocabulary: int
    """Rows of the output layer; 0 where the model has none."""


def shape_of_settings(settings: ModelSettings, *, vocabulary: int) -> Shape:
    """The shape of the bundled GPT.

    Args:
        settings: as `trainrun.models.gpt.GPT` takes them.
        vocabulary: of the dataset; ``settings.vocabulary`` comes first. With 0 for both the embedding is not counted.
    """
    width, inner = settings.width, settings.feed_forward or 4 * settings.width
    kv_width = (settings.kv_heads or settings.heads) * (width // settings.heads)
    rows = settings.vocabulary or vocabulary
    gated = settings.activation == "swiglu"
    norm = width if settings.norm_weights else 0
    block = 2 * width * width + 2 * width * kv_width + (3 if gated else 2) * width * inner + 2 * norm
    parameters = settings.layers * block + norm * (2 if settings.embedding_norm else 1)
    parameters += rows * width * (1 if settings.tied else 2)
    return Shape(
        parameters=parameters,
        layers=settings.layers,
        width=width,
        query_width=width,
        kv_width=kv_width,
        feed_forward=inner,
        gated=gated,
        vocabulary=rows,
    )


def shape_of_config(config: Mapping[str, Any]) -> Shape:
    """The shape of a Hugging Face model.

    Args:
        config: what its ``config.json`` holds. What is missing there has transformers' default.

    Raises:
        ConfigError: a kind of model that is not known here, or sizes that are missing.
    """
    kind = config.get("model_type")
    if kind not in FAMILIES:
        known = nearest(str(kind), FAMILIES)
        raise ConfigError([f"model_type is {kind!r}, whose parameters cannot be counted from its configuration. {known}"])
    try:
        return FAMILIES[kind](config)
    except KeyError as error:
        raise ConfigError(
            [f"The configuration of a {kind} model has no {error.args[0]!r}. Give the whole config.json."]
        ) from None


def _llama(config: Mapping[str, Any]) -> Shape:
    biases = bool(config.get("attention_bias", False))
    return _decoder(config, kv_heads=config["num_attention_heads"], attention_biases=(biases, biases))


def _mistral(config: Mapping[str, Any]) -> Shape:
    return _decoder(config, kv_heads=8)


def _mixtral(config: Mapping[str, Any]) -> Shape:
    return _decoder(config, kv_heads=8, experts=config.get("num_local_experts", 8), active=config.get("num_experts_per_tok", 2))


def _qwen2(config: Mapping[str, Any]) -> Shape:
    return _decoder(config, kv_heads=32, attention_biases=(True, False))


def _qwen3(config: Mapping[str, Any]) -> Shape:
    biases = bool(config.get("attention_bias", False))
    sized = config if config.get("head_dim") else {**config, "head_dim": 128}
    return _decoder(sized, kv_heads=32, attention_biases=(biases, biases), head_norms=True)


def _decoder(
    config: Mapping[str, Any],
    *,
    kv_heads: int,
    attention_biases: tuple[bool, bool] = (False, False),
    head_norms: bool = False,
    experts: int = 0,
    active: int = 1,
) -> Shape:
    """Llama's architecture and what is close to it.

    Args:
        kv_heads: of transformers' configuration where the file names none (planners that take ``num_attention_heads`` for
            Mixtral count 2.4 billion too many).
        attention_biases: of queries, keys and values; of the output.
        head_norms: whether each head of queries and of keys is normalised with weights.
        experts: feed-forward layers per block between which a router chooses; 0 for one without a router.
        active: experts that one token goes through.
    """
    width, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or width // heads
    query_width, kv_width = heads * size, (config.get("num_key_value_heads") or kv_heads) * size
    attention = 2 * width * query_width + 2 * width * kv_width
    attention += attention_biases[0] * (query_width + 2 * kv_width) + attention_biases[1] * width
    attention += 2 * size if head_norms else 0
    feed_forward = 3 * width * inner + (2 * inner + width if config.get("mlp_bias") else 0)
    if experts:
        feed_forward = experts * feed_forward + experts * width
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings", False) else 2)
    return Shape(
        parameters=embeddings + layers * (attention + feed_forward + 2 * width) + width,
        layers=layers,
        width=width,
        query_width=query_width,
        kv_width=kv_width,
        feed_forward=inner * active,
        gated=True,
        vocabulary=config["vocab_size"],
    )


def _gpt_neox(config: Mapping[str, Any]) -> Shape:
    width, inner = config["hidden_size"], config["intermediate_size"]
    biases = 4 * width if config.get("attention_bias", True) else 0
    block = 4 * width * width + biases + 2 * width * inner + inner + width + 4 * width
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings", False) else 2)
    return _ungated(config["num_hidden_layers"], width, inner, embeddings, block, 2 * width, config["vocab_size"])


def _gpt2(config: Mapping[str, Any]) -> Shape:
    width = config["n_embd"]
    inner = config.get("n_inner") or 4 * width
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    embeddings = config["vocab_size"] * width * (1 if config.get("tie_word_embeddings", True) else 2)
    embeddings += config["n_positions"] * width
    return _ungated(config["n_layer"], width, inner, embeddings, block, 2 * width, config["vocab_size"])


def _bert(config: Mapping[str, Any]) -> Shape:
    width, inner = config["hidden_size"], config["intermediate_size"]
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    rows = config["vocab_size"] + config["max_position_embeddings"] + config["type_vocab_size"]
    pooler = width * width + width
    return _ungated(config["num_hidden_layers"], width, inner, rows * width + 2 * width, block, pooler, 0)


def _ungated(layers: int, width: int, inner: int, embeddings: int, block: int, last: int, vocabulary: int) -> Shape:
    return Shape(
        parameters=embeddings + layers * block + last,
        layers=layers,
        width=width,
        query_width=width,
        kv_width=width,
        feed_forward=inner,
        gated=False,
        vocabulary=vocabulary,
    )


FAMILIES: dict[str, Callable[[Mapping[str, Any]], Shape]] = {
    "bert": _bert,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
"""By ``model_type``."""
