"""What a job may say, and that all that is wrong with it is reported at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from traincluster import TrainingJob
from trainrun.config import ConfigError


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "train.py").write_text("")
    (tmp_path / "package" / "module.py").write_text("")
    (tmp_path / "package" / "__main__.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    return tmp_path


def test_the_bundled_gpt_needs_no_source():
    assert TrainingJob(run="first").spec(python="/python").entry_point == "trainrun.pretrain"


@pytest.mark.parametrize("entry_point", ["train.py", "package/module.py", "package.module", "package", "train"])
def test_a_script_or_module_of_the_source(source, entry_point):
    job = TrainingJob(run="first", source=source, entry_point=entry_point)
    assert job.spec(python="/python").entry_point == entry_point


@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.parametrize("entry_point", ["./run.sh", "/usr/local/bin/all_reduce_perf"])
def test_a_program_of_the_source_or_of_the_image(source, entry_point, launcher):
    spec = TrainingJob(run="first", source=source, entry_point=entry_point, launcher=launcher).spec(python="/python")
    assert (spec.entry_point, spec.launcher, spec.is_program) == (entry_point, launcher, True)


def test_a_program_of_the_image_needs_no_source():
    assert TrainingJob(run="first", entry_point="/usr/bin/hostname").spec(python="/python").is_program


def test_a_program_that_cannot_be_executed_is_refused(source):
    (source / "run.sh").chmod(0o644)
    with pytest.raises(ConfigError, match=r"which is not executable\. Make it so: chmod \+x .*run\.sh"):
        TrainingJob(run="first", source=source, entry_point="./run.sh")


@pytest.mark.parametrize("entry_point", ["missing.py", "package.missing", "../outside.py", "./missing", "run.sh", "./"])
def test_an_entry_point_outside_the_source_is_refused(source, entry_point):
    (source.parent / "outside.py").write_text("")
    with pytest.raises(ConfigError, match="which is not packed from the source"):
        TrainingJob(run="first", source=source, entry_point=entry_point)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"run": ""}, "run is ''. Allowed: letters, digits"),
        ({"run": "a/b"}, "run is 'a/b'"),
        ({"run": "x" * 64}, "at most 63"),
        ({"entry_point": "train.py"}, "there is no source that holds it"),
        ({"source": "/no/such/folder", "entry_point": "train.py"}, "which is not a folder"),
        ({"launcher": "mpiexec"}, "launcher is 'mpiexec'. Allowed: 'torchrun', 'mpirun'."),
        ({"stop_signal": "SIGKILL"}, "stop_signal is 'SIGKILL'. Allowed: '', 'SIGTERM', 'SIGUSR1', 'SIGUSR2', 'SIGINT'."),
        ({"stop_signal": "SIGUSR1"}, "which would end trainrun.pretrain without a checkpoint"),
        ({"numa": "cores"}, "numa is 'cores'. Allowed: 'auto', 'none', 'node', 'socket', 'exclusive', 'core-complex'."),
        (
            {"launcher": "mpirun", "numa": "socket"},
            "numa is 'socket', but the launcher mpirun takes 'auto', 'none' or 'node'.",
        ),
        ({"source": "/no/such/folder", "entry_point": "/bin/true"}, "Give the folder that the program works in"),
        ({"environment": {"1X": "y"}}, "environment names the variable '1X'"),
        ({"publish_seconds": 0}, "publish_seconds is 0. Allowed: more than 0"),
        ({"configuration": {"stepz": 3}}, "Unknown setting 'stepz' in the job's configuration. Did you mean 'steps'?"),
        ({"configuration": {"steps": "many"}}, "steps must be a whole number, not 'many'"),
        ({"configuration": {"run": "x"}}, "Set the job's run instead"),
        ({"configuration": {"checkpoint": {"location": "s3://x"}}}, "which a node takes from the cluster"),
    ],
)
def test_what_could_not_run_is_refused(arguments, message):
    with pytest.raises(ConfigError) as caught:
        TrainingJob(**{"run": "first", **arguments})
    assert message in str(caught.value)


def test_a_source_that_nothing_uses_is_refused(source):
    with pytest.raises(ConfigError, match="which uses nothing of it"):
        TrainingJob(run="first", source=source, entry_point="trainrun.other")


def test_all_problems_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        TrainingJob(run="a b", entry_point="train.py", configuration={"steps": 0})
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize("entry_point", [".hidden.py", "__pycache__/cached.py", "sub/train", "sub..train", "../train.py"])
def test_an_entry_point_that_is_not_packed_is_refused(tmp_path, entry_point):
    for name in (".hidden.py", "__pycache__/cached.py", "sub/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="which is not packed from the source"):
        TrainingJob(run="first", source=tmp_path, entry_point=entry_point)


def test_a_module_that_trainrun_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="which is no module of trainrun"):
        TrainingJob(run="first", entry_point="trainrun.nonexistent")


def test_a_deepspeed_file_is_read_on_the_laptop_and_goes_to_the_nodes_whole(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    job = TrainingJob(run="r", configuration={"steps": 3, "deepspeed": str(tmp_path / "ds.json")})
    assert job.settings.strategy == "zero2"
    assert job.spec(python="python").configuration == {
        "steps": 3,
        "deepspeed": {"zero_optimization": {"stage": 2, "overlap_comm": True}},
    }


def test_what_is_wrong_with_a_deepspeed_file_is_said_at_synth(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}')
    with pytest.raises(ValueError, match="reduce_bucket_size is 0"):
        TrainingJob(run="r", configuration={"deepspeed": str(tmp_path / "ds.json")})
    with pytest.raises(ValueError, match=r"nowhere\.json cannot be read"):
        TrainingJob(run="r", configuration={"deepspeed": str(tmp_path / "nowhere.json")})
