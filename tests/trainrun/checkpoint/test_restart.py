"""Runs that are killed, damaged and resumed, on one rank and on several."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainrun.__main__ import main
from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.digest import model_digest
from trainrun.checkpoint.layout import committed_steps, read_commit, shard_key
from trainrun.checkpoint.read import kinds, newest_good
from trainrun.evaluation import restore_gpt
from trainrun.store import open_store

EVERY_2_OF_6 = ["--steps=6", "--checkpoint.every_steps=2", "--checkpoint.keep=10"]


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        (1, ["--strategy=ddp"]),
        (4, ["--strategy=fsdp2"]),
    ],
    ids=["ddp-1", "fsdp2-4"],
)
def test_num_08_a_killed_run_goes_on_bit_for_bit(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path, world: int, strategy: list[str]
) -> None:
    """Losses, rates, weights and both moments, with dropout and accumulation, ten steps after the checkpoint at step 7. Every
    strategy is in test_bitwise.py, and a kill at every point of a save in test_crash.py."""
    arguments = [*tiny, *strategy, f"--data={dataset}", "--steps=17", "--checkpoint.every_steps=7", "--micro_batch=1"]
    location = f"--checkpoint.location={tmp_path / 'runs'}"
    whole = ranks("train", world=world, arguments=[*arguments, f"--checkpoint.location={tmp_path / 'whole'}"], dropout=True)
    killed = ranks("train", world=world, arguments=[*arguments, location], dropout=True, kill_at=9)
    assert [outcome.code for outcome in killed] == [-signal.SIGKILL] * world, killed[0].log
    resumed = ranks("train", world=world, arguments=[*arguments, location], dropout=True)
    for before, after in zip(whole, resumed, strict=True):
        assert after.code == 0, after.log
        assert after.result["resumed"] == 7
        assert after.result["restored"] == before.result["saved"]["7"]
        assert after.result["losses"] == before.result["losses"][7:]
        assert after.result["rates"] == before.result["rates"][7:]
        assert after.result["final"] == before.result["final"]
        assert after.result["tokens"] == before.result["tokens"]
    commit = read_commit(open_store(str(tmp_path / "runs/run")), 7)
    moments = [name for name in kinds(commit) if name.startswith("optimizer/") and name.endswith("/exp_avg_sq")]
    assert len(moments) == sum(name.startswith("model/") for name in kinds(commit))


def test_a_run_that_is_done_finds_nothing_to_do(ranks: Any, tiny: list[str], dataset: str, tmp_path: Path) -> None:
    arguments = [*tiny, f"--data={dataset}", "--steps=3", f"--checkpoint.location={tmp_path / 'runs'}"]
    first = ranks("train", arguments=arguments)[0]
    again = ranks("train", arguments=arguments)[0]
    assert again.code == 0
    assert again.result["resumed"] == 3
    assert again.result["seen"] == []
    assert again.result["final"] == first.result["final"]


def test_num_07_any_number_of_ranks_goes_on_from_any_other(ranks: Any, tiny: list[str], dataset: str, bucket: str) -> None:
    arguments = [*tiny, f"--data={dataset}", "--checkpoint.every_steps=2", f"--checkpoint.location=s3://{bucket}/runs"]
    for world, kill_at in ((2, 3), (1, 5), (4, 7)):
        killed = ranks("train", world=world, arguments=[*arguments, "--steps=8"], kill_at=kill_at)
        assert [outcome.code for outcome in killed] == [-signal.SIGKILL] * world, killed[0].log
    outcomes = ranks("train", world=2, arguments=[*arguments, "--steps=8"])
    assert [outcome.result["resumed"] for outcome in outcomes] == [6, 6]
    assert outcomes[0].result["final"] == outcomes[1].result["final"]
    assert "written by 4 ranks, now there are 2: random streams" in outcomes[0].log
    plain = ranks("train", arguments=[*tiny, f"--data={dataset}", "--steps=8"])[0]
    for name, value in outcomes[0].parameters().items():
        np.testing.assert_allclose(value, plain.parameters()[name], atol=2e-4, err_msg=name)
    store = open_store(f"s3://{bucket}/runs/run")
    commit = read_commit(store, 6)
    assert commit.world == 4
    names = [set(shard.tensors) for shard in commit.shards]
    assert all(any(name.startswith("model/") for name in own) for own in names)  # the upload is shared
    assert sum(len(own) for own in names) == len(set.union(*names))


@pytest.mark.parametrize("kill_after_put", [1, 3, 5, 10])
def test_ckpt_01_killed_after_any_put_the_checkpoint_before_is_whole(
    ranks: Any, tiny: list[str], dataset: str, bucket: str, kill_after_put: int
) -> None:
    """Steps 2, 4, 6 put a shard, its description and then a COMMIT each: put 3n makes the n-th checkpoint exist, not before."""
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location=s3://{bucket}/runs"]
    outcome = ranks("train", arguments=arguments, kill_after_put=kill_after_put)[0]
    assert outcome.code == (-signal.SIGKILL if kill_after_put <= 9 else 0)
    store = open_store(f"s3://{bucket}/runs/run")
    expected = min(kill_after_put // 3, 3)
    assert committed_steps(store) == [2, 4, 6][:expected]
    if expected:
        commit, damage = newest_good(store, lambda commit: find_damage(store, commit), warn=pytest.fail)
        assert not damage
        assert commit.step == 2 * expected
    resumed = ranks("train", arguments=arguments)[0]
    assert resumed.code == 0, resumed.log
    assert resumed.result["resumed"] == 2 * expected
    assert committed_steps(store) == [2, 4, 6]


def test_ckpt_01_a_rank_killed_before_its_shard_is_there_leaves_no_commit(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path
) -> None:
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location={tmp_path / 'runs'}"]
    # rank 1 puts its shard of step 2 and the description, and its shard of step 4
    outcomes = ranks("train", world=2, arguments=arguments, only={1: {"kill_after_put": 3}})
    assert outcomes[1].code == -signal.SIGKILL
    assert outcomes[0].code == 1
    assert committed_steps(open_store(str(tmp_path / "runs/run"))) == [2]


def test_ckpt_02_rank_0_decides_what_is_resumed(ranks: Any, tiny: list[str], dataset: str, tmp_path: Path) -> None:
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location={tmp_path / 'runs'}"]
    ranks("train", world=2, arguments=arguments, kill_at=5)
    resumed = ranks("train", world=2, arguments=arguments, faults=("rank_1_sees_no_checkpoint",))
    assert [outcome.result["resumed"] for outcome in resumed] == [4, 4]


def test_ckpt_02_damage_that_one_rank_reads_takes_all_ranks_back(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path
) -> None:
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location={tmp_path / 'runs'}"]
    ranks("train", world=2, arguments=arguments, kill_at=5)
    resumed = ranks("train", world=2, arguments=arguments, faults=("rank_1_reads_damage_at_step_4",))
    assert [outcome.result["resumed"] for outcome in resumed] == [2, 2]
    assert "step 4 is damaged: rank 1: rank 1 read something else" in resumed[0].log
    assert committed_steps(open_store(str(tmp_path / "runs/run"))) == [2, 4, 6]


def test_a_sharded_checkpoint_is_used_as_any_other_and_a_damaged_slice_takes_all_ranks_back(
    ranks: Any, tiny: list[str], dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location={tmp_path / 'runs'}", "--strategy=fsdp2"]
    first = ranks("train", world=2, arguments=arguments)
    assert [outcome.code for outcome in first] == [0, 0], first[0].log
    store = open_store(str(tmp_path / "runs/run"))
    commit, gpt = newest_good(store, lambda commit: restore_gpt(store, commit), warn=pytest.fail)
    assert {len(shard.tensors["model/embedding.weight"]) for shard in commit.shards} == {1}  # each has a slice
    lines = [json.loads(line) for path in first[0].folder.glob("state/metrics/*.jsonl") for line in path.open()]
    finished = next(line for line in lines if line.get("event") == "finished")
    assert finished["model_sha256"] == model_digest(gpt)  # of shards in memory, and of the whole model
    for name, parameter in gpt.named_parameters():
        np.testing.assert_array_equal(first[0].parameters()[name], parameter.detach(), err_msg=name)
    assert main(["checkpoint", "verify", store.url, "--all"]) == 0
    assert capsys.readouterr().out.count("  verified, ") == 3
    assert main(["generate", "--checkpoint", store.url, "--bytes=5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model_sha256"] == finished["model_sha256"]

    shard = commit.shards[1]
    path = Path(store.url, shard.key)
    data = bytearray(path.read_bytes())
    data[shard.tensors["model/embedding.weight"][0].offset] ^= 1
    path.write_bytes(data)
    again = ranks("train", world=2, arguments=arguments)
    assert [outcome.result["resumed"] for outcome in again] == [4, 4]
    assert "step 6 is damaged: rank 1: " in again[0].log
    assert re.search(r"bytes of model/embedding.weight .*are not those that were written", again[0].log)
    assert "rank 0: " not in again[0].log  # which reads its own slices only
    assert [outcome.result["final"] for outcome in again] == [outcome.result["final"] for outcome in first]
    assert committed_steps(store) == [2, 4, 6]


def test_ckpt_12_a_store_that_is_slow_at_first_gets_the_checkpoint(
    ranks: Any, s3: Any, tiny: list[str], dataset: str, bucket: str
) -> None:
    s3.fail(r"PUT .*rank-00002", times=2)
    arguments = [*tiny, f"--data={dataset}", "--steps=2", f"--checkpoint.location=s3://{bucket}/runs", "--batch_tokens=96"]
    outcomes = ranks("train", world=3, arguments=arguments)
    assert [outcome.code for outcome in outcomes] == [0, 0, 0], outcomes[2].log
    assert committed_steps(open_store(f"s3://{bucket}/runs/run")) == [2]
    puts = [request for request in s3.requests if request.startswith("PUT") and "/runs/" in request]
    assert "COMMIT.json" in puts[-1]


def test_ckpt_12_a_save_that_always_fails_on_one_rank_fails_on_all_and_ends_the_run_at_the_third(
    ranks: Any, s3: Any, tiny: list[str], dataset: str, bucket: str
) -> None:
    s3.fail(r"PUT .*rank-00002")
    arguments = [*tiny, f"--data={dataset}", "--steps=9", f"--checkpoint.location=s3://{bucket}/runs"]
    arguments += ["--checkpoint.every_steps=2", "--batch_tokens=96", "--checkpoint.timeout_seconds=2"]
    outcomes = ranks("train", world=3, arguments=arguments)
    assert [outcome.code for outcome in outcomes] == [1, 1, 1]
    for outcome in outcomes:
        assert "3 saves in a row failed, the last at step 6: rank 2" in outcome.log
        assert "SlowDown" in outcome.log
    assert "saving step 2 failed (1 of 3 in a row): rank 2" in outcomes[0].log
    assert committed_steps(open_store(f"s3://{bucket}/runs/run")) == []


def test_metrics_tell_what_happened(ranks: Any, tiny: list[str], dataset: str, tmp_path: Path) -> None:
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location={tmp_path / 'runs'}"]
    ranks("train", world=2, arguments=arguments, kill_at=4)
    outcomes = ranks("train", world=2, arguments=arguments)
    lines = [json.loads(line) for path in outcomes[0].folder.glob("state/metrics/*.jsonl") for line in path.open()]
    events = [(line["event"], line["step"]) for line in lines if "event" in line]
    assert events == [("strategy", 0), ("resumed", 2), ("started", 2), ("committed", 4), ("committed", 6), ("finished", 6)]
    step = next(line for line in lines if line.get("step") == 5)
    assert {"time", "loss", "learning_rate", "gradient_norm", "tokens_per_second", "seconds_left"} <= step.keys()
    assert (step["steps"], step["tokens"], step["world"], step["precision"]) == (6, 5 * 128, 2, "fp32")
    assert not list(outcomes[1].folder.glob("state/metrics/*"))


def test_every_checkpoint_has_bytes_of_its_own(ranks: Any, tiny: list[str], dataset: str, tmp_path: Path) -> None:
    arguments = [*tiny, f"--data={dataset}", *EVERY_2_OF_6, f"--checkpoint.location={tmp_path / 'runs'}"]
    ranks("train", arguments=arguments)
    store = open_store(str(tmp_path / "runs/run"))
    commits = [read_commit(store, step) for step in (2, 4, 6)]
    assert len({commit.shards[0].sha256 for commit in commits}) == 3
    assert [commit.tokens for commit in commits] == [256, 512, 768]
    assert [commit.shards[0].key for commit in commits] == [shard_key(c.step, c.attempt, 0) for c in commits]
    assert commits[-1].settings["model"]["width"] == 16
