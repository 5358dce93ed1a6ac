"""The fine-tuning recipe, on one rank and on two: the loss falls, worlds agree, a stopped run goes on, exports load."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trainrun import finetune
from trainrun.config import ConfigError
from trainrun.data.examples_write import write_examples
from trainrun.data.tokenizer import tokenizer_of
from trainrun.data.write import find_documents

COMMON = [
    *("--batch_examples=8", "--micro_batch=3", "--sequence_length=32", "--steps=8", "--log_every=1"),
    *("--optimizer.warmup_steps=2", "--optimizer.learning_rate=1e-2", "--checkpoint.timeout_seconds=20"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, and three datasets of their tokens."""
    folder = tmp_path_factory.mktemp("finetune")
    tiny_models.make_llama(folder / "llama")
    tiny_models.make_bert(folder / "bert")
    lines = {"sums": tiny_models.write_sums(folder / "sums.jsonl"), "films": tiny_models.write_films(folder / "films.jsonl")}
    lines["plain"] = folder / "plain.jsonl"
    texts = [json.loads(line)["text"] for line in lines["films"].read_text().splitlines()]
    lines["plain"].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, model in (("sums", "llama"), ("films", "bert"), ("plain", "bert")):
        write_examples(find_documents([str(lines[name])]), tokenizer_of(str(folder / model)), str(folder / name))
    return folder


def losses(outcome: Any) -> list[float]:
    lines = [json.loads(line) for path in (outcome.folder / "state/metrics").iterdir() for line in path.open()]
    return [line["loss"] for line in lines if "loss" in line]


def arguments(folder: Path, data: str, model: str, task: str, export: Path) -> list[str]:
    return [
        *COMMON,
        *(f"--data={folder / data}", f"--finetune.model={folder / model}"),
        *(f"--finetune.task={task}", f"--finetune.export={export}"),
    ]


def test_survey_37_a_decoder_learns_alike_on_any_ranks_and_goes_on_where_it_was_stopped(
    folder: Path, tmp_path: Path, ranks: Any
) -> None:
    """Completions of different lengths in micro-batches of three and two: the same step as with all eight at once."""
    alone = ranks("finetune", arguments=[*arguments(folder, "sums", "llama", "causal", tmp_path / "alone"), "--micro_batch=8"])
    assert alone[0].code == 0, alone[0].log
    curve = losses(alone[0])
    assert len(curve) == 8
    assert curve[-1] < 0.9 * curve[0]

    split = [
        *arguments(folder, "sums", "llama", "causal", tmp_path / "split"),
        *("--strategy=fsdp2", f"--checkpoint.location={tmp_path / 'runs'}"),
    ]
    stopped = ranks("finetune", world=2, arguments=split, stop=True)
    assert [outcome.code for outcome in stopped] == [75, 75], stopped[0].log
    assert not (tmp_path / "split").exists()
    resumed = ranks("finetune", world=2, arguments=split)
    assert [outcome.code for outcome in resumed] == [0, 0], resumed[0].log
    assert [*losses(stopped[0]), *losses(resumed[0])] == pytest.approx(curve, abs=1e-5)

    ours, theirs = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("split", "alone"))
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4, msg=name)
    AutoTokenizer.from_pretrained(tmp_path / "split")


def test_fine_tuning_has_small_steps_where_nothing_is_set(folder: Path, ranks: Any) -> None:
    given = ["--batch_examples=8", "--sequence_length=32", "--steps=1", "--optimizer.warmup_steps=0"]
    (outcome,) = ranks("finetune", arguments=[*given, f"--data={folder / 'sums'}", f"--finetune.model={folder / 'llama'}"])
    assert outcome.code == 0, outcome.log
    assert "lr 2.0e-06" in outcome.log, "the last step's tenth of 2e-5"


def test_a_classifier_learns_alike_on_any_ranks(folder: Path, tmp_path: Path, ranks: Any) -> None:
    alone, split = (
        ranks(
            "finetune",
            world=world,
            arguments=[*arguments(folder, "films", "bert", "classification", tmp_path / str(world)), "--steps=24"],
        )
        for world in (1, 2)
    )
    assert [outcome.code for outcome in (*alone, *split)] == [0, 0, 0], alone[0].log + split[0].log
    curve = losses(alone[0])
    assert losses(split[0]) == pytest.approx(curve, abs=1e-5)
    assert curve[0] == pytest.approx(math.log(2), abs=0.35)
    assert curve[-1] < 0.3
    assert "Drawn anew" in split[0].log
    assert "Drawn anew" not in split[1].log
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "2").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "2")
    for text, expected in (("the film is good film", "good"), ("the film is bad", "bad")):
        logits = model(**tokenizer(text, return_tensors="pt")).logits
        assert model.config.id2label[int(logits.argmax())] == expected


def test_an_encoder_learns_masked_words(folder: Path, tmp_path: Path, ranks: Any) -> None:
    (outcome,) = ranks("finetune", arguments=[*arguments(folder, "plain", "bert", "masked", tmp_path / "out"), "--steps=30"])
    assert outcome.code == 0, outcome.log
    curve = losses(outcome)
    assert sum(curve[-5:]) < 0.7 * sum(curve[:5])


def test_what_cannot_be_fine_tuned_is_refused_before_the_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*arguments: str) -> str:
        monkeypatch.setattr("sys.argv", ["finetune", *arguments])
        with pytest.raises(ConfigError) as caught:
            finetune.main()
        return str(caught.value)

    data = f"--data={folder / 'films'}"
    assert "batch_examples is not set" in refused(data)
    sizes = '--deepspeed={"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}'
    assert "Set it to 8, as the DeepSpeed file says." in refused(data, sizes)
    named = (f"--finetune.model={folder / 'bert'}", "--finetune.task=classification")
    assert "has 64 positions" in refused(data, sizes, *named), "the file's batch is taken, and the next thing is wrong"
    assert "a step has one size" in refused(data, "--batch_examples=8", "--batch_tokens=512")
    assert "Allowed: 'classification'" in refused(data, "--batch_examples=8")
    task = ("--batch_examples=8", "--finetune.task=classification", "--sequence_length=32")
    assert "No model is named" in refused(data, *task)
    assert "written with another tokenizer" in refused(data, *task, f"--finetune.model={folder / 'llama'}")
    assert "examples.json is missing" in refused(f"--data={tmp_path}", *task)
