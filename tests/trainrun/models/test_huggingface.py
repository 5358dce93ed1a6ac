"""Models of transformers: loaded weight by weight, refused by name, exported as they came."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertModel

from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.examples import ExamplesDescription
from trainrun.data.tokenizer import tokenizer_of
from trainrun.models.huggingface import Loaded, load_model
from trainrun.models.huggingface_export import export_model
from trainrun.models.weights import give_memory
from trainrun.settings import FineTuneSettings


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_bert(tmp_path_factory.mktemp("models") / "bert")


def load(folder: Path, task: Any, *, said: list[str] | None = None, sequence_length: int = 32, **settings: Any) -> Loaded:
    tokenizer = tokenizer_of(str(folder))
    data = ExamplesDescription(
        **{"tokenizer": tokenizer.name, "vocabulary": tokenizer.vocabulary, "padding": tokenizer.padding, "mask": tokenizer.mask},
        **{"kind": "labelled", "classes": ("bad", "good", "so-so"), "examples": 0, "tokens": 0},
        **{"tokens_file": "", "tokens_sha256": "", "entries_file": "", "entries_sha256": ""},
    )
    chosen = FineTuneSettings(model=str(folder), task=task, **settings)
    loaded = load_model(chosen, data, sequence_length=sequence_length, say=(said if said is not None else []).append)
    give_memory(loaded.model, loaded.weights, torch.device("cpu"))
    return loaded


def altered(folder: Path, to: Path, change: Any) -> Path:
    """A copy of a model with other weights."""
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    weights = load_file(to / "model.safetensors")
    change(weights)
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def batch(*, classes: bool = False) -> Batch:
    torch.manual_seed(0)
    inputs, present = torch.randint(7, len(tiny_models.WORDS), (2, 6)), torch.ones(2, 6, dtype=torch.int64)
    present[1, 4:] = 0
    targets = torch.tensor([2, 0]) if classes else torch.randint(7, len(tiny_models.WORDS), (2, 6)).where(present == 1, IGNORED)
    return Batch(inputs, targets, present)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_a_decoder_computes_what_transformers_computes_and_its_loss_is_a_sum(tied: bool, shards: bool, tmp_path: Path) -> None:
    folder = tiny_models.make_llama(tmp_path, tied=tied, shards=shards)
    assert (folder / "model.safetensors.index.json").exists() == shards
    said: list[str] = []
    ours = load(folder, "causal", said=said).model
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    data = batch()
    torch.testing.assert_close(ours(data), theirs(data.inputs).logits)
    # transformers shifts by itself: its labels are the targets one place later, of which the first has no place
    labels = torch.cat([torch.full((2, 1), IGNORED), data.targets], dim=1)[:, :6]
    targets = torch.cat([data.targets[:, :-1], torch.full((2, 1), IGNORED)], dim=1)
    expected = theirs(data.inputs, labels=labels).loss * int((targets != IGNORED).sum())
    torch.testing.assert_close(ours.loss(Batch(data.inputs, targets)), expected)
    assert ours.training
    assert not said
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    if tied:
        assert ours.model.lm_head.weight is ours.model.model.embed_tokens.weight


def test_padding_changes_nothing(llama: Path, bert: Path) -> None:
    data = batch()
    for folder, task in ((llama, "causal"), (bert, "masked")):
        model = load(folder, task).model.eval()
        alone = Batch(data.inputs[1:, :4], data.targets[1:, :4], torch.ones(1, 4, dtype=torch.int64))
        torch.testing.assert_close(model.loss(Batch(data.inputs[1:], data.targets[1:], data.present[1:])), model.loss(alone))


def test_an_encoder_guesses_masked_words_as_in_transformers(bert: Path) -> None:
    data = batch()
    theirs = AutoModelForMaskedLM.from_pretrained(bert).eval()
    torch.testing.assert_close(
        load(bert, "masked").model.eval()(data), theirs(data.inputs, attention_mask=data.present).logits, atol=1e-5, rtol=1e-4
    )


@pytest.mark.parametrize("task", ["llama", "bert"])
def test_a_new_classifier_is_drawn_and_said(task: str, request: pytest.FixtureRequest) -> None:
    said: list[str] = []
    loaded = load(request.getfixturevalue(task), "classification", said=said)
    drawn = "score.weight" if task == "llama" else "classifier.weight"
    assert drawn in said[0]
    assert "Not used" in said[1]
    data = batch(classes=True)
    logits = loaded.model(data)
    assert logits.shape == (2, 3)
    torch.testing.assert_close(loaded.model.loss(data), torch.nn.functional.cross_entropy(logits, data.targets) * 2)
    again = load(request.getfixturevalue(task), "classification")
    assert torch.equal(again.weights.read(f"model.{drawn}"), loaded.weights.read(f"model.{drawn}"))  # on every rank


def test_weights_without_their_first_name_and_of_old_names_find_their_place(bert: Path, tmp_path: Path) -> None:
    def strip(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            old = (
                name.removeprefix("bert.")
                .replace("LayerNorm.weight", "LayerNorm.gamma")
                .replace("LayerNorm.bias", "LayerNorm.beta")
            )
            weights[old] = weights.pop(name)
        weights["embeddings.position_ids"] = torch.arange(64)[None]  # files of old versions hold it

    said: list[str] = []
    bare = load(altered(bert, tmp_path / "bare", strip), "classification", said=said)
    whole = load(bert, "classification")
    for name, parameter in bare.model.named_parameters():
        assert torch.equal(parameter, whole.model.get_parameter(name)), name
    assert "position_ids" not in "".join(said)


def test_weights_that_do_not_fit_are_named_and_refused_unless_allowed(llama: Path, tmp_path: Path) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.layers.1.mlp.up_proj.weight"]
        weights["model.norm.weight"] = torch.ones(17)
        weights["model.layers.7.mlp.up_proj.weight"] = torch.ones(3)

    folder = altered(llama, tmp_path / "spoilt", spoil)
    with pytest.raises(ConfigError) as caught:
        load(folder, "causal")
    assert len(caught.value.problems) == 3
    assert f"No file in {folder} has the weights model.layers.1.mlp.up_proj.weight" in str(caught.value)
    assert "model.norm.weight is [17]" in str(caught.value)
    assert f"The files in {folder} have model.layers.7.mlp.up_proj.weight, the model has not" in str(caught.value)
    allowed = load(folder, "causal", new_weights=("model.layers.1.mlp", "model.norm"), unused_weights=("model.layers.7",))
    assert allowed.model.model.model.norm.weight.tolist() == [1] * 16


def test_a_missing_head_of_a_decoder_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has the weights lm_head\.weight"):
        load(altered(llama, tmp_path / "headless", lambda weights: weights.pop("lm_head.weight")), "causal")


def test_quantised_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    def quantise(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.ones(16, dtype=torch.int8)

    with pytest.raises(ConfigError, match=r"model\.norm\.weight in .* is of type I8: quantised weights cannot be trained"):
        load(altered(llama, tmp_path / "int8", quantise), "causal")


def test_folders_that_hold_no_model_are_errors(llama: Path, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has neither model\.safetensors nor"):
        (folder := altered(llama, tmp_path / "a", lambda weights: None)).joinpath("model.safetensors").unlink()
        load(folder, "causal")
    index = {"weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"lacks model-00001-of-00002\.safetensors"):
        load(folder, "causal")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"no config\.json that transformers can read"):
        load(folder, "causal")
    with pytest.raises(ConfigError, match=r"the model in .* has 64 positions\. Set it lower"):
        load(llama, "causal", sequence_length=100)
    with pytest.raises(ConfigError, match=r"\(llama\) is not for the task 'masked'"):
        load(llama, "masked")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="nobody/nothing is no folder here, and could not be fetched"):
        load_model(FineTuneSettings(model="nobody/nothing"), None, sequence_length=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="No model is named"):
        load_model(FineTuneSettings(), None, sequence_length=8)  # type: ignore[arg-type]


def test_data_of_another_tokenizer_are_refused(llama: Path, bert: Path) -> None:
    tokenizer = tokenizer_of(str(bert))
    data = ExamplesDescription(
        **{"tokenizer": tokenizer.name, "vocabulary": 1000, "padding": 0, "mask": 4, "kind": "text", "classes": ()},
        **{"examples": 0, "tokens": 0, "tokens_file": "", "tokens_sha256": "", "entries_file": "", "entries_sha256": ""},
    )
    with pytest.raises(ConfigError, match="written with another tokenizer") as caught:
        load_model(FineTuneSettings(model=str(llama)), data, sequence_length=8)
    assert "token ids up to 999, the model" in str(caught.value)


def test_without_transformers_the_error_says_what_to_install(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r'pip install "traincluster\[transformers\]"'):
        load_model(FineTuneSettings(model=str(llama)), None, sequence_length=8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r'pip install "traincluster\[transformers\]"'):
        tokenizer_of(str(llama))


@pytest.mark.parametrize("largest_file", [10**9, 4000])
def test_an_export_is_a_model_that_transformers_and_we_load(llama: Path, tmp_path: Path, largest_file: int) -> None:
    loaded = load(llama, "causal")
    tensors = {name.removeprefix("model."): p.detach() + 1 for name, p in loaded.model.named_parameters()}
    export_model(loaded.model.model, tensors.items(), str(tmp_path / "out"), source=llama, largest_file=largest_file)
    assert (tmp_path / "out/model.safetensors.index.json").exists() == (largest_file == 4000)
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, tensors[name]), name
    assert tokenizer_of(str(tmp_path / "out")).name == tokenizer_of(str(llama)).name  # what was tokenized may be used again
    again = load(tmp_path / "out", "causal").model
    torch.testing.assert_close(again(batch()), theirs(batch().inputs).logits)
    assert (tmp_path / "out/generation_config.json").exists()


def test_a_bare_encoder_is_enough_for_classification(bert: Path, tmp_path: Path) -> None:
    BertModel.from_pretrained(bert).save_pretrained(tmp_path)
    for path in bert.glob("tokenizer*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    said: list[str] = []
    load(tmp_path, "classification", said=said)
    assert len(said) == 1
    assert "classifier.weight" in said[0]
