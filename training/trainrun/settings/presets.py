"""Published shapes of the bundled GPT. Standard library only, like all settings.

Llama's are those of the ``config.json`` beside its published weights (``hidden_size``, ``intermediate_size``,
``num_hidden_layers``, ``num_attention_heads``, ``num_key_value_heads``, ``vocab_size``, ``rms_norm_eps``, ``rope_theta``,
``rope_scaling``, ``tie_word_embeddings``):

- Llama 3 and 3.1, 8B and 70B: "The Llama 3 Herd of Models" (arXiv 2407.21783); repeated with vocabulary and ties in
  github.com/vulkomilev/oumi, ``configs/recipes/llama3_1/README.md``.
- Llama 3.2, 1B: ``config.json`` as repeated in github.com/kevinstephano/thunder_model_blocks, ``hf_llama/llama_config.py``;
  3B: github.com/silvaxxx1/MyLLM_101, ``models/LLAMA/Llama3.2/Llama_configs.py``. Both stretch their positions 32 times.
- Llama 2: "Llama 2: Open Foundation and Fine-Tuned Chat Models" (arXiv 2307.09288); 7B and 13B as transformers prints them in
  github.com/Retruth/deontic, ``nlp_models/llama2/README.md``.

The counts of parameters that follow (8,030,261,248 for 8B, 70,553,706,496 for 70B) are checked by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainrun.config import merge

_LLAMA: Mapping[str, Any] = {
    "activation": "swiglu",
    "norm_weights": True,
    "norm_epsilon": 1e-5,
    "embedding_norm": False,
    "query_key_norm": False,
    "tied": False,
}
_LLAMA2: Mapping[str, Any] = {**_LLAMA, "vocabulary": 32_000, "rope_base": 10_000.0}
_LLAMA3: Mapping[str, Any] = {**_LLAMA, "vocabulary": 128_256, "rope_base": 500_000.0}

_LLAMA3_8B = {**_LLAMA3, "layers": 32, "width": 4096, "heads": 32, "kv_heads": 8, "feed_forward": 14_336}
_LLAMA3_70B = {**_LLAMA3, "layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "feed_forward": 28_672}
_LLAMA32 = {**_LLAMA3, "tied": True, "rope_scaling": 32.0, "feed_forward": 8192, "kv_heads": 8}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": {**_LLAMA2, "layers": 32, "width": 4096, "heads": 32, "feed_forward": 11_008},
    "llama2-13b": {**_LLAMA2, "layers": 40, "width": 5120, "heads": 40, "feed_forward": 13_824},
    "llama2-70b": {**_LLAMA2, "layers": 80, "width": 8192, "heads": 64, "kv_heads": 8, "feed_forward": 28_672},
    "llama3-8b": _LLAMA3_8B,
    "llama3-70b": _LLAMA3_70B,
    "llama3.1-8b": {**_LLAMA3_8B, "rope_scaling": 8.0},
    "llama3.1-70b": {**_LLAMA3_70B, "rope_scaling": 8.0},
    "llama3.2-1b": {**_LLAMA32, "layers": 16, "width": 2048, "heads": 32},
    "llama3.2-3b": {**_LLAMA32, "layers": 28, "width": 3072, "heads": 24},
}


def with_preset(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping of `trainrun.settings.TrainSettings`, with the values of its ``model.preset`` under its own."""
    model = mapping.get("model")
    name = model.get("preset") if isinstance(model, Mapping) else None
    known = isinstance(name, str) and name in PRESETS
    return merge({"model": PRESETS[str(name)]}, mapping) if known else dict(mapping)
