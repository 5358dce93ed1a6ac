"""Checkpoints that DeepSpeed and torch.distributed.checkpoint wrote become trainrun's, tensor for tensor, and run no code."""

from __future__ import annotations

import io
import pickle
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign
import pytest
import resharding
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from trainrun.checkpoint import convert as conversion
from trainrun.checkpoint.convert import Choice, convert, open_foreign, parse_rename
from trainrun.checkpoint.damage import find_damage
from trainrun.checkpoint.digest import tensors_digest
from trainrun.checkpoint.layout import committed_steps
from trainrun.checkpoint.pickles import load_torch_file
from trainrun.checkpoint.read import read_tensors
from trainrun.checkpoint.tensors import model_tensors
from trainrun.config import ConfigError
from trainrun.errors import CheckpointError
from trainrun.optimizer import bundled
from trainrun.store import Store, StoreError, open_store

WORLD = 3
"""Of the ranks that save; what does not divide evenly is where mistakes are."""

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "zero1": {"zero_optimization": {"stage": 1}},
    "zero1, elastic": {"zero_optimization": {"stage": 1, "elastic_checkpoint": True}},
    "zero1 in bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "zero2": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "zero2 in bf16": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    "zero3": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 1000}},
    "zero3 in bf16": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
}


@pytest.fixture(scope="module")
def saved(lasting_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each kind, made by one group of processes."""
    folder = tmp_path_factory.mktemp("saved")
    wanted = {"folder": str(folder), "deepspeed": CONFIGURATIONS, "universal": ["zero2", "zero3"]}
    outcomes = lasting_ranks("save_as_others_do", world=WORLD, longest=120.0, **wanted)
    assert [outcome.code for outcome in outcomes] == [0] * WORLD, "\n".join(outcome.log for outcome in outcomes)
    return folder


def converted(source: Path | str, target: Path | str, **options: Any) -> tuple[Store, dict[str, Tensor], conversion.Converted]:
    """What a checkpoint became: its store, its tensors, and what was said."""
    store = open_store(str(target))
    result = convert(open_foreign(open_store(str(source))), store, **options)
    assert not find_damage(store, result.commit)
    return store, read_tensors(store, result.commit, lambda name: True), result


@pytest.mark.parametrize("name", [*CONFIGURATIONS, "universal zero2", "universal zero3", "dcp"])
def test_every_tensor_is_what_the_library_itself_says_it_is(name: str, saved: Path, tmp_path: Path) -> None:
    counted: list[int] = []
    store, found, result = converted(saved / name, tmp_path / "run", done=counted.append)
    truth: dict[str, Tensor] = torch.load(saved / name / "truth.pt", weights_only=True)
    if name == "dcp":  # which keeps tied weights twice
        assert torch.equal(truth.pop("model/head.weight"), truth["model/embedding.weight"])
        assert "Tied weights are kept once: head.weight (is embedding.weight)." in result.remarks
        assert "Not carried over, since it is neither model nor optimizer state: of_the_user, step." in result.remarks
    assert found.keys() == truth.keys()
    for key, tensor in truth.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key
    assert any(tensor.abs().sum() > 0 for key, tensor in truth.items() if key.endswith("exp_avg"))
    assert committed_steps(store) == [foreign.STEPS]
    assert any("position in the data" in remark for remark in result.remarks)
    assert result.commit.versions["converted_from"].startswith("torch.distributed" if name == "dcp" else "DeepSpeed 0.19.8, ")
    assert sum(counted) > 3 * 4 * truth["model/embedding.weight"].numel()


@pytest.mark.parametrize("name", ["zero3", "dcp"])
def test_a_run_goes_on_from_a_converted_checkpoint(
    name: str, saved: Path, alone: Callable[..., Any], dataset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its next step is the one that torch's own optimizer takes from the same weights and moments."""
    _, found, _ = converted(saved / name, tmp_path / "run")
    run = alone(f"--data={dataset}", "--steps=3", f"--checkpoint.location={tmp_path}", "--optimizer.name=adamw")
    data = run.tokens()
    gpt = resharding.OddGPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    assert run.state(model=model, optimizer=optimizer, data=data).resume() == foreign.STEPS
    told = capsys.readouterr().err
    assert "no position in the data" in told
    assert "no random streams (dropout) that fit here" in told or "random streams (dropout) do not go on" in told
    for key, tensor in model_tensors(gpt).items():
        assert torch.equal(tensor, found[key]), key
    for key, state in optimizer.state_dict()["state"].items():
        assert int(state["step"]) == foreign.STEPS, key
    assert data.position == 0
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
    moments = optimizer.state[gpt.embedding.weight]["exp_avg"]
    assert int(optimizer.state[gpt.embedding.weight]["step"]) == foreign.STEPS + 1
    assert not torch.equal(moments, found["optimizer/embedding.weight/exp_avg"])


def test_sharded_runs_go_on_from_what_others_sharded_otherwise(
    saved: Path, ranks: Any, tiny: list[str], dataset: str, tmp_path: Path
) -> None:
    """What three ranks wrote with ZeRO 3 and FSDP2, two go on from."""
    stages, expected = {}, {}
    for name in ("zero3", "dcp"):
        _, found, _ = converted(saved / name, tmp_path / name / "run")
        arguments = [*tiny, "--strategy=fsdp2", f"--data={dataset}", f"--checkpoint.location={tmp_path / name}", "--steps=100"]
        stages[name] = {"arguments": arguments}
        expected[name] = tensors_digest(sorted(found.items()))
    outcomes = ranks("reshard", world=2, stages=stages)
    assert [outcome.code for outcome in outcomes] == [0, 0], outcomes[0].log
    for name, result in outcomes[0].result.items():
        assert result["resumed"] == foreign.STEPS, result
        assert result["digest"] == expected[name], name


def test_steps_that_an_optimizer_counts_in_its_groups_are_found() -> None:
    """As DeepSpeed's fused Adam does, which needs a GPU."""
    state = {"state": {0: {"exp_avg": 1}, 1: {"exp_avg": 2, "step": 7}}, "param_groups": [{"step": 5}, {"step": 5}, {"step": 5}]}
    assert conversion.convert_deepspeed.state_by_group(state) == {0: {"exp_avg": 1, "step": 5}, 1: {"exp_avg": 2, "step": 7}}


def test_checkpoints_on_s3_are_read_and_written_in_shards(
    saved: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "SHARD_SIZE", 20_000)
    for name in ("zero2", "dcp"):
        source, target = open_store(f"s3://{bucket}/{name}"), f"s3://{bucket}/runs/{name}"
        for path in (saved / name).rglob("*"):
            if path.is_file() and path.name != "truth.pt":
                source.put_file(path.relative_to(saved / name).as_posix(), path)
        _, remote, result = converted(source.url, target)
        _, local, _ = converted(saved / name, tmp_path / name)
        assert result.commit.world > 3
        assert max(shard.length for shard in result.commit.shards) < 40_000
        assert remote.keys() == local.keys()
        assert all(torch.equal(remote[key], local[key]) for key in local)


def test_names_can_be_changed_and_the_optimizer_left(saved: Path, tmp_path: Path) -> None:
    renames = [parse_rename("^blocks[.]=layers."), parse_rename("^=model.")]
    _, found, _ = converted(saved / "zero1", tmp_path / "run", choice=Choice(renames=renames, drop=re.compile("odd")))
    assert not any("odd" in name for name in found)
    assert "model/model.layers.0.attention.keys.weight" in found
    assert "optimizer/model.layers.0.attention.keys.weight/exp_avg" in found
    for name in ("zero1", "dcp"):
        _, found, result = converted(saved / name, tmp_path / "bare" / name, choice=Choice(parameters_only=True), step=7)
        assert result.commit.step == 7
        assert all(key.startswith("model/") for key in found)
        assert "model/head.weight" not in found
    for wrong, why in (("blocks", "has no equals sign"), ("(=x", "is no regular expression"), (r"a=\2", "invalid group")):
        with pytest.raises(ConfigError, match=why):
            parse_rename(wrong)


def test_a_checkpoint_of_plain_weights_needs_a_step_and_one_of_numbered_state_says_so(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    dcp.save(model.bfloat16().state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)
    with pytest.raises(CheckpointError, match="Give their number with --step"):
        converted(tmp_path / "plain", tmp_path / "run")
    _, found, _ = converted(tmp_path / "plain", tmp_path / "run", step=5)
    assert torch.equal(found["model/weight"], model.weight.float())
    with pytest.raises(CheckpointError, match=r"COMMIT\.json already, and nothing is overwritten"):
        converted(tmp_path / "plain", tmp_path / "run", step=5)
    both = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(both, checkpoint_id=tmp_path / "numbered", no_dist=True)
    _, found, result = converted(tmp_path / "numbered", tmp_path / "other", step=5)
    assert found.keys() == {"model/weight", "model/bias"}
    assert "by number, not by name: only parameters were carried over" in result.remarks[0]


def test_weights_at_the_root_beside_flattened_optimizer_state_are_told_apart(tmp_path: Path) -> None:
    """As torchtitan saves."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    everything = {**model.state_dict(), "optimizer": flat, "train_state": {"step": torch.tensor(4)}, "lr_scheduler": {"last": 4}}
    dcp.save(everything, checkpoint_id=tmp_path / "root", no_dist=True)
    _, found, result = converted(tmp_path / "root", tmp_path / "run")
    assert result.commit.step == 4
    assert len(found) == 4 + 3 * 4
    assert torch.equal(found["model/1.weight"], model[1].weight)
    assert torch.equal(found["optimizer/1.weight/exp_avg_sq"], optimizer.state[model[1].weight]["exp_avg_sq"])
    assert any("train_state.step" in remark and "lr_scheduler.last" in remark for remark in result.remarks)


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_num_09_a_hostile_file_of_deepspeed_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for file in ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"):
        source = tmp_path / file
        shutil.copytree(saved / "zero1", source)
        torch.save({"module": Bomb(trap)}, source / "global_step2" / file)
        with pytest.raises(
            CheckpointError, match=r"refers to 1 name of code .*: (builtins\.getattr|pathlib\.Path\.touch)"
        ) as refusal:
            converted(source, tmp_path / "run")
        assert file in str(refusal.value)
    (source / "global_step2" / file).write_bytes(pickle.dumps(Bomb(trap)))  # without the zip that torch makes
    with pytest.raises(CheckpointError, match=r"is no file of torch\.save"):
        converted(source, tmp_path / "run")
    assert not trap.exists()
    assert committed_steps(open_store(str(tmp_path / "run"))) == []


def test_num_09_a_hostile_file_of_dcp_is_refused_and_not_run(saved: Path, tmp_path: Path) -> None:
    trap, source = tmp_path / "trap", tmp_path / "dcp"
    shutil.copytree(saved / "dcp", source)
    good = (source / ".metadata").read_bytes()
    (source / ".metadata").write_bytes(pickle.dumps(Bomb(trap)))
    with pytest.raises(
        CheckpointError, match=r"\.metadata refers to 1 name of code .*: (builtins\.getattr|pathlib\.Path\.touch)"
    ):
        converted(source, tmp_path / "run")
    (source / ".metadata").write_bytes(good)
    hostile = io.BytesIO()
    torch.save(Bomb(trap), hostile)
    for path in source.glob("*.distcp"):
        path.write_bytes(hostile.getvalue() + bytes(1_000_000))
    with pytest.raises(CheckpointError, match="is no tensor that can be read"):
        converted(source, tmp_path / "run")
    assert not trap.exists()


@pytest.mark.parametrize("name", ["os.system", "builtins.eval", "torch.hub.load", "posix.system", "functools.partial"])
def test_num_09_no_name_of_code_passes(name: str, tmp_path: Path) -> None:
    module, _, attribute = name.rpartition(".")
    hostile = pickle.PROTO + b"\x02c" + f"{module}\n{attribute}\n".encode() + b"X\x04\x00\x00\x00true\x85R."
    with pytest.raises(CheckpointError, match="was refused"):
        conversion.convert_dcp.load_dcp_metadata(hostile, "x")
    torch.save({}, tmp_path / "file")
    with zipfile.ZipFile(tmp_path / "file") as whole, zipfile.ZipFile(tmp_path / "hostile", "w") as changed:
        for item in whole.namelist():
            changed.writestr(item, hostile if item.endswith("data.pkl") else whole.read(item))
    with pytest.raises(CheckpointError, match=r"refers to 1 name of code|Trying to|blocklisted|cannot be read"):
        load_torch_file(tmp_path / "hostile")


@pytest.mark.parametrize("name", ["zero1", "zero3", "dcp"])
def test_files_that_are_missing_or_cut_off_are_named(name: str, saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved / name, source)
    files = sorted(path for path in source.rglob("*") if path.suffix in (".pt", ".distcp") and path.name != "truth.pt")
    assert len(files) > WORLD - 1
    for number, path in enumerate(files):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(CheckpointError, match=r"cannot be read|can be read|damaged"):
            converted(source, tmp_path / f"cut{number}")
        assert not list(open_store(str(tmp_path / f"cut{number}")).list())  # nothing is left of it
        path.unlink()
        with pytest.raises((CheckpointError, StoreError), match=r"There is no|lacks|has none of|files of|mixed"):
            converted(source, tmp_path / f"gone{number}")
        assert committed_steps(open_store(str(tmp_path / f"gone{number}"))) == []
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["zero2", "zero3", "dcp"])
def test_a_bit_that_flipped_in_the_source_is_not_carried_over(name: str, saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(saved / name, source)
    files = sorted(path for path in source.rglob("*") if path.suffix in (".pt", ".distcp") and path.name != "truth.pt")
    weights = torch.load(saved / name / "truth.pt", weights_only=True)["optimizer/embedding.weight/exp_avg_sq"]
    sought = weights.numpy().tobytes()[:64]  # of rank 0's share
    (path,) = (path for path in files if sought in path.read_bytes())
    data = bytearray(path.read_bytes())
    data[data.index(sought) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"damaged|cannot be read|can be read"):
        converted(source, tmp_path / "run")
    assert committed_steps(open_store(str(tmp_path / "run"))) == []


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1), change=st.binary(max_size=12), cut=st.booleans())
def test_num_09_metadata_of_any_bytes_is_read_or_refused(
    place: float, change: bytes, cut: bool, saved: Path, tmp_path: Path
) -> None:
    data = (saved / "dcp" / ".metadata").read_bytes()
    start = int(place * len(data))
    (tmp_path / ".metadata").write_bytes(data[:start] + change + (b"" if cut else data[start + len(change) :]))
    for path in (saved / "dcp").glob("*.distcp"):
        if not (tmp_path / path.name).exists():
            shutil.copy(path, tmp_path / path.name)
    try:
        source = open_foreign(open_store(str(tmp_path)))
        for _ in source.parts:
            pass
    except (CheckpointError, StoreError):
        return


def test_what_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"There is no checkpoint at .* that convert reads"):
        open_foreign(open_store(str(tmp_path)))
    (tmp_path / "latest").write_text("../../etc")
    with pytest.raises(CheckpointError, match=r"names '\.\./\.\./etc', and there is no such folder"):
        open_foreign(open_store(str(tmp_path)))
    (tmp_path / "latest").write_text("step1")
    (tmp_path / "step1").mkdir()
    torch.save({"module": {}}, tmp_path / "step1/mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="has none of the optimizer's files"):
        open_foreign(open_store(str(tmp_path)))
    torch.save({}, tmp_path / "step1/zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointError, match="is not of a ZeRO checkpoint"):
        open_foreign(open_store(str(tmp_path)))
    torch.save({}, tmp_path / "step1/zero_pp_rank_0_mp_rank_01_optim_states.pt")
    with pytest.raises(CheckpointError, match="written with tensor parallelism"):
        open_foreign(open_store(str(tmp_path)))
    torch.save({}, tmp_path / "step1/layer_00-model_states.pt")
    with pytest.raises(CheckpointError, match="written with pipeline parallelism"):
        open_foreign(open_store(str(tmp_path)))
