"""With Llama's settings the bundled GPT is Llama: transformers computes the same with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainrun.config import ConfigError, from_mapping
from trainrun.models.gpt import GPT
from trainrun.models.llama import llama_config, llama_name
from trainrun.settings import ModelSettings
from trainrun.settings.presets import PRESETS
from trainrun.settle import settle


@pytest.mark.parametrize(
    ("preset", "context", "scaling"),
    [
        ("llama3-8b", 64, None),
        ("llama3.1-8b", 64, 8.0),
        ("llama3.2-1b", 20_000, 32.0),  # beyond the context from which positions are stretched
        ("llama2-7b", 64, None),
    ],
)
def test_llama_settings_compute_what_transformers_computes(preset: str, context: int, scaling: float | None) -> None:
    kv_heads = 2 if PRESETS[preset].get("kv_heads") else 0
    tiny = {"layers": 2, "width": 32, "heads": 4, "kv_heads": kv_heads, "feed_forward": 48, "vocabulary": 101}
    settings = from_mapping(ModelSettings, {**PRESETS[preset], **tiny})
    written = llama_config(settings, vocabulary=101, context=context, end=None)
    assert ("rope_scaling" in written) == (scaling is not None)
    config = LlamaConfig(**written, attn_implementation="sdpa")
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config).eval()
    gpt = GPT(settings, vocabulary=101, context=context)
    theirs = dict(llama.named_parameters())
    with torch.no_grad():
        for parameter in theirs.values():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
        for name, parameter in gpt.named_parameters():
            parameter.copy_(theirs.pop(llama_name(name)))
        assert not theirs  # all of Llama's weights have a place
        tokens = torch.randint(101, (2, 40))
        torch.testing.assert_close(gpt(tokens), llama(tokens).logits, atol=1e-5, rtol=0)
        cosine, sine = llama.model.rotary_emb(torch.zeros(1), torch.tensor([[context - 1]]))
        half = cosine.shape[-1] // 2
        # (the angle of the last position is up to 20,000 radians, of which fp32 keeps about three decimals)
        torch.testing.assert_close(gpt.cosine[-1], cosine[0, 0, :half], atol=2e-3, rtol=0)
        torch.testing.assert_close(gpt.sine[-1], sine[0, 0, :half], atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    settings = settle(None, [f"--model.preset={preset}"]).model
    with torch.device("meta"):
        gpt = GPT(settings, vocabulary=257, context=32)
    assert sum(parameter.numel() for parameter in gpt.parameters()) == parameters


def test_every_preset_is_counted() -> None:
    counted = test_presets_have_the_published_number_of_parameters.pytestmark[0].args[1]
    assert {name for name, _ in counted} == set(PRESETS)


def test_a_preset_lies_under_the_file_and_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: {preset: llama3-8b, layers: 4, width: 2048}\n")
    model = settle(path, ["--model.layers=2"]).model
    assert (model.layers, model.width, model.heads, model.rope_base) == (2, 2048, 32, 500_000.0)
    assert settle(path, ["--model.preset=llama2-7b"]).model.kv_heads == 0


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'llama-3-8b', which is unknown\. Did you mean 'llama3-8b'\?"):
        settle(None, ["--model.preset=llama-3-8b"])


def test_a_vocabulary_smaller_than_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.vocabulary is 100, the dataset has token ids up to 256"):
        GPT(ModelSettings(vocabulary=100), vocabulary=257, context=8)
