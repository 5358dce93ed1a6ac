"""The commands, from text to a trained model's words."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from trainrun import evaluation
from trainrun.__main__ import main
from trainrun.data.dataset import HELD_OUT, TRAIN, open_dataset
from trainrun.evaluation import bits_per_byte, count_models
from trainrun.models.gpt import GPT
from trainrun.settings import ModelSettings


def test_from_text_on_s3_to_a_trained_model(
    corpus: Path, bucket: str, tiny: list[str], ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path / "cache"))
    data, runs = f"s3://{bucket}/text", f"s3://{bucket}/runs"
    assert main(["tokens", str(corpus), "--out", data, "--held-out", "0.2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["splits"]["train"]["documents"] == 7
    arguments = [*tiny, f"--data={data}", "--steps=150", "--model.width=32", "--optimizer.learning_rate=1e-2"]
    outcomes = ranks("train", world=2, arguments=[*arguments, f"--checkpoint.location={runs}"])
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].log

    assert main(["checkpoint", "ls", f"{runs}/run", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in rows] == [100, 150]
    assert main(["checkpoint", "verify", f"{runs}/run", "--all"]) == 0
    assert capsys.readouterr().out.count("verified") == 2

    assert main(["evaluate", "--checkpoint", f"{runs}/run", "--data", data, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"] == 150
    assert result["model_bits_per_byte"] < result["unigram_bits_per_byte"]
    assert result["bigram_bits_per_byte"] < result["unigram_bits_per_byte"]

    arguments = ["generate", "--checkpoint", f"{runs}/run", "--prompt", "the ", "--bytes", "30"]
    assert main([*arguments, "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    assert len(text) == 30
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"the {text}\n"


def test_a_model_of_other_tokens_than_bytes_is_evaluated_and_speaks_through_its_tokenizer(
    tiny: list[str], ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, data, run = tmp_path / "texts", str(tmp_path / "data"), str(tmp_path / "runs/run")
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}").write_text("the film is good " * 300)
    tokenizer = str(tiny_models.make_tokenizer(tmp_path / "tokenizer"))
    assert main(["tokens", str(texts), "--out", data, "--tokenizer", tokenizer, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["vocabulary"] == len(tiny_models.WORDS)
    arguments = [*tiny, f"--data={data}", "--steps=100", "--optimizer.learning_rate=1e-2", "--model.vocabulary=100"]
    (outcome,) = ranks("train", world=1, arguments=[*arguments, f"--checkpoint.location={tmp_path / 'runs'}"])
    assert outcome.code == 0, outcome.log

    assert main(["evaluate", "--checkpoint", run, "--data", data, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["held_out_bytes"] == len("the film is good " * 300)
    assert result["model_bits_per_byte"] < result["unigram_bits_per_byte"] < 1  # 2 bits for about 4 bytes

    generate = ["generate", "--checkpoint", run, "--prompt", "the film", "--tokens", "4", "--temperature", "0"]
    assert main([*generate, "--tokenizer", tokenizer]) == 0
    assert capsys.readouterr().out == "the film is good the film\n"
    for wrong in ([], ["--tokenizer", str(tiny_models.make_tokenizer(tmp_path / "other", more=1))]):
        assert main([*generate, *wrong]) == 1
        assert "was trained on tokens of sha256:" in capsys.readouterr().err
    assert main([*generate, "--tokenizer", str(tmp_path / "none")]) == 1
    assert "There is no folder" in capsys.readouterr().err

    assert main(["tokens", str(texts), "--out", str(tmp_path / "bytes")]) == 0
    assert main(["evaluate", "--checkpoint", run, "--data", str(tmp_path / "bytes")]) == 1
    assert "holds those of bytes: the same ids mean other text" in capsys.readouterr().err


def test_damage_and_absence_are_told_and_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(tmp_path)]) == 1
    assert "There is no checkpoint" in capsys.readouterr().err
    (tmp_path / "step-000000007").mkdir()
    (tmp_path / "step-000000007/COMMIT.json").write_text("{}")
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "step         7  DAMAGED: step-000000007/COMMIT.json is not " in capsys.readouterr().out
    assert main(["generate", "--checkpoint", str(tmp_path)]) == 1
    assert "All 1 checkpoints" in capsys.readouterr().err
    assert main(["tokens", str(tmp_path / "none"), "--out", str(tmp_path)]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_counting_models_are_probabilities(dataset: str) -> None:
    """Bits by the definition, one token at a time."""
    opened = open_dataset(dataset)
    train, held_out = opened.tokens(TRAIN), opened.tokens(HELD_OUT)[:300]
    found = count_models(train, held_out, vocabulary=257, text_bytes=299)
    unigram = [(np.count_nonzero(train == token) + 1) / (len(train) + 257) for token in range(257)]
    bits = [0.0, 0.0]
    for before, after in itertools.pairwise(held_out):
        followers = train[1:][train[:-1] == before]
        kinds = max(1, len(set(followers.tolist())))
        bits[0] -= math.log2(unigram[after])
        bits[1] -= math.log2((np.count_nonzero(followers == after) + kinds * unigram[after]) / (len(followers) + kinds))
    assert found.unigram == pytest.approx(bits[0] / 299)
    assert found.bigram == pytest.approx(bits[1] / 299)


def test_counting_models_of_large_vocabularies_need_no_table_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renamed tokens give the same bits, but for the unigram's added counts; and pieces the same as the whole."""
    generator = np.random.default_rng(0)
    train, held_out = (generator.integers(0, 5, size).astype(np.uint32) for size in (1000, 100))
    far = np.array([0, 7, 65_536, 100_000, 128_255], dtype=np.uint32)
    found = count_models(far[train], far[held_out], vocabulary=128_256, text_bytes=99)
    assert found.bigram == pytest.approx(count_models(train, held_out, vocabulary=5, text_bytes=99).bigram, rel=0.2)
    monkeypatch.setattr(evaluation, "PAIRS_AT_ONCE", 7)
    assert count_models(far[train], far[held_out], vocabulary=128_256, text_bytes=99) == found


@pytest.mark.parametrize("count", [2, 7, 16, 17, 18, 100, 129])
def test_bits_per_byte_counts_every_token_once(count: int) -> None:
    gpt = GPT(ModelSettings(layers=1, width=16, heads=2), vocabulary=257, context=16)
    with torch.no_grad():
        gpt.embedding.weight.zero_()  # all tokens alike: log2(257) bits each
    tokens = np.arange(count, dtype=np.uint16)
    assert bits_per_byte(gpt, tokens, text_bytes=count - 1) == pytest.approx(math.log2(257))


def test_torchrun_trains_the_bundled_loop_and_a_stop_file_ends_it(dataset: str, tiny: list[str], tmp_path: Path) -> None:
    """The command of the README, as a node runs it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINRUN_STATE": str(tmp_path / "state"), "PYTHONPATH": _package_path()}
    arguments = [*tiny, f"--data={dataset}", f"--checkpoint.location={tmp_path / 'runs'}"]
    command = [*(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d")]
    command += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", "trainrun.pretrain", *arguments]

    def torchrun(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *more], env=environment, capture_output=True, text=True, timeout=90, check=False)

    done = torchrun("--steps=4")
    assert done.returncode == 0, done.stderr
    assert "step 4/4  loss" in done.stdout
    (tmp_path / "state/stop").touch()
    stopped = torchrun("--steps=400")
    assert stopped.returncode != 0
    assert "Resumed from step 4" in stopped.stderr
    assert "state/stop, which is older than this process: delete it to train on: ended at step 4 of 400." in stopped.stderr


def test_wrong_settings_end_the_loop_with_a_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainrun.pretrain", "--data=nowhere", "--stepz=3"]
    environment = {**os.environ, "PYTHONPATH": _package_path()}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert ended.returncode == 1
    assert "Unknown setting 'stepz' in the command line. Did you mean 'steps'?" in ended.stderr
    assert "Traceback" not in ended.stderr


def _package_path() -> str:
    import trainrun

    return str(Path(trainrun.__file__).parents[1])


def test_importing_trainrun_does_not_import_torch() -> None:
    check = "import sys, trainrun, trainrun.store, trainrun.spec, trainrun.__main__; sys.exit('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", check], env={**os.environ, "PYTHONPATH": _package_path()}, timeout=60, check=False
    )
    assert ended.returncode == 0


def test_a_model_of_one_token_of_context_can_be_evaluated() -> None:
    gpt = GPT(ModelSettings(layers=1, width=8, heads=2), vocabulary=257, context=1).eval()
    tokens = np.arange(20, dtype=np.uint16)
    assert 6 < bits_per_byte(gpt, tokens, text_bytes=19) < 12
