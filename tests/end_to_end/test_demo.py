"""The demo, smaller: the real CLI, real user data, real training, a real kill; where only loopback exists."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.isolation import LOOPBACK_ONLY, ORDINARY_USER, ROOT, as_ordinary_user
from tests.leftovers import assert_nothing_is_left

pytestmark = pytest.mark.slow

STEPS, EVERY = 80, 10
SETTINGS = [f"training.steps={STEPS}", f"training.checkpoint.every_steps={EVERY}"]
ROOT_ON_LINUX = sys.platform == "linux" and os.geteuid() == 0
AS_ROOT = pytest.mark.skipif(not ROOT_ON_LINUX, reason="only root can make a network without a way out and become another user")


@pytest.fixture
def scratch():
    """A folder that other users can enter, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp(prefix="demo-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def demo_command(build, *options, prefix=()):
    settings = [word for setting in SETTINGS for word in ("-c", setting)]
    return [*prefix, sys.executable, "-m", "demo", "--build", str(build), "--short", *settings, *options]


def run_demo(build, *options, prefix=(), **environment):
    """Run the demo to its end; return its summary."""
    answer = subprocess.run(
        demo_command(build, *options, prefix=prefix),
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert answer.returncode == 0, f"{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
    assert "Traceback" not in answer.stdout + answer.stderr
    return json.loads((build / "demo" / "summary.json").read_text())


def assert_the_whole_way(summary, build):
    """Everything that the demo promises, of a run that was short."""
    assert summary["nodes"] == 2
    assert summary["steps"] == STEPS
    (kill,) = summary["kills"]
    assert kill["instance_id"] in summary["instance_ids"]
    assert len(summary["instance_ids"]) == 3, "the node that was killed was not replaced by one other"
    assert EVERY <= kill["at_step"] < STEPS
    assert 0 <= summary["steps_lost"] <= 2 * EVERY
    assert summary["checkpoints_committed"][-1] == STEPS
    assert summary["last_loss"] < 0.75 * summary["first_loss"]
    assert summary["held_out_bits_per_byte"] < summary["baselines"]["unigram"] < 8
    assert summary["baselines"]["bigram"] < summary["baselines"]["unigram"]
    assert summary["restored_model_sha256"] == summary["trained_model_sha256"] != ""
    left = summary["resources_left"]
    assert left["AWS::CloudFormation::Stack"] == ["CDKToolkit", "TrainingDataStack"]
    assert len(left["AWS::S3::Bucket"]) == 3  # checkpoints, datasets, the bootstrap's assets
    assert not [kind for kind in left if kind.startswith(("AWS::EC2::", "AWS::AutoScaling::", "AWS::Logs::"))]
    assert (build / "demo" / "loss.png").stat().st_size > 10_000
    assert_nothing_is_left(build / "local", set())


@AS_ROOT
def test_the_whole_way_as_root_with_the_node_of_rank_0_killed(scratch):
    summary = run_demo(scratch, "--kill", "rank0", prefix=LOOPBACK_ONLY, HOME=str(scratch))
    assert summary["tier"].startswith("isolated-root")
    assert summary["kills"][0]["held_rank_0"]
    assert_the_whole_way(summary, scratch)


@AS_ROOT
def test_the_whole_way_as_an_ordinary_user_with_the_other_node_killed(scratch):
    build = scratch / "home"
    build.mkdir()
    os.chown(build, ORDINARY_USER, ORDINARY_USER)
    prefix = [*LOOPBACK_ONLY, *as_ordinary_user(scratch)]
    summary = run_demo(build, "--kill", "other", prefix=prefix, HOME=str(build))
    assert summary["tier"].startswith("isolated-user")
    assert not summary["kills"][0]["held_rank_0"]
    assert_the_whole_way(summary, build)


def test_the_whole_way_in_plain_processes(scratch):
    prefix = LOOPBACK_ONLY if ROOT_ON_LINUX else ()
    summary = run_demo(scratch, "--tier", "plain", prefix=prefix, HOME=str(scratch))
    assert "no boot" in summary["tier"]
    assert_the_whole_way(summary, scratch)
