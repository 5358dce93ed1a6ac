"""A cluster on the local fleet in which faults are made: what the end-to-end tests and `benchmarks/recovery.py` share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

import trainlocal
from demo.run_view import RunView, parse_lines
from traincluster import chaos
from trainlocal.environment import inherited
from trainrun.store import open_store

ROOT = Path(__file__).resolve().parents[2]
STACK = "TrainingClusterStack"
LOOP = '''
"""The loop of trainrun.pretrain, with a pause in each step: as long as a step of a larger model, without its work."""
import os, time
import trainrun
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled

run = trainrun.start()
data = run.tokens()
gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
state = run.state(model=model, optimizer=optimizer, data=data)
state.resume()
for _ in run.steps():
    for batch in data.micro_batches():
        time.sleep(float(os.environ["PAUSE"]))
        run.backward(model.loss(batch))
    run.step(optimizer)
    state.save()
'''
SETTINGS: dict[str, Any] = {
    "run": "first",
    "instance_type": "c7i.large",
    "nodes": 2,
    "min_nodes": 2,
    "source": "project",
    "entry_point": "train.py",
    "environment": {"OMP_NUM_THREADS": "1", "PAUSE": "0.1"},
    "data": "corpus",
    "publish_seconds": 0.5,
    "on_success": "keep",
    "timeouts": {"peer_lost": 5, "stop_grace": 30, "no_progress": 8},
    "training": {
        "steps": 120,
        "batch_tokens": 512,
        "sequence_length": 64,
        "log_every": 1,
        "collective_timeout_seconds": 15,
        "model": {"layers": 1, "width": 32, "heads": 2},
        "checkpoint": {"every_steps": 10},
    },
}
"""min_nodes is nodes, so that the world has two ranks at each step, and the parameters come out the same to the last bit."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What became of a fault. Seconds count from just before it was made; None where there was no such thing."""

    fault: str
    at_step: int
    heard: float | None
    """Until the first word of it in a node's events."""
    training: float
    """Until a step was taken that had not been taken before the fault."""
    after_boot: float | None
    """Of them, those after the replacement of a lost node had booted."""
    steps_lost: int
    """Steps that had to be taken again."""


class Faulted:
    """One deployed cluster after the other in one local cloud."""

    def __init__(self, directory: Path, local: trainlocal.Local) -> None:
        self._directory, self._local, self.tier = directory, local, local.tier
        if local.tier == "plain":
            return
        imports = os.pathsep.join(str(ROOT / folder) for folder in ("constructs", "training", "local", "."))
        self.environment = {**inherited(), **local.environment(), "PYTHONPATH": imports}
        (directory / "project").mkdir(exist_ok=True)
        (directory / "project/train.py").write_text(LOOP)
        self._cdk("bootstrap", "aws://123456789012/us-east-1", "--app", "")
        self._write(SETTINGS)
        self._deploy("TrainingDataStack")
        (bucket,) = [one["Name"] for one in boto3.client("s3").list_buckets()["Buckets"] if "datasets" in one["Name"]]
        source = str(ROOT / "training/trainrun/data")
        self.command(sys.executable, "-m", "trainrun", "tokens", source, "--glob", "*.py", "--out", f"s3://{bucket}/corpus")

    def start(self, run: str, **settings: Any) -> None:
        """Deploy a run, so that its nodes boot, and wait until it has committed a checkpoint.

        Args:
            run: its name.
            settings: what differs from `SETTINGS`; the training settings over those there.
        """
        training = {**SETTINGS["training"], **settings.pop("training", {})}
        self._write({**SETTINGS, **settings, "run": run, "training": training})
        self._deploy(STACK)
        self.cluster = chaos.Cluster(STACK)
        boto3.client("autoscaling").set_desired_capacity(AutoScalingGroupName=self.cluster.group, DesiredCapacity=2)
        self.view = RunView(self.cluster.location)
        self.wait(lambda: bool(self.view.commits), "the first checkpoint", seconds=120)

    def make(self, fault: str, *, node: str = "any", seconds: float = 10.0, interrupts: bool = True) -> Recovery:
        """Make a fault and wait until the run has come further than it was.

        Args:
            fault: of `traincluster.chaos.FAULTS`.
            node: on which.
            seconds: how long a temporary one lasts.
            interrupts: whether the ranks are started anew because of it.
        """
        (known,) = [one for one in chaos.FAULTS if one.name == fault]
        self.view.refresh()
        step, nodes, made = self.view.step, {node.instance_id for node in self._local.nodes()}, time.time()
        chaos.make(self.cluster, known, node=node, seconds=seconds, luck=0.0)

        def further() -> float | None:
            resumed = [event["time"] for event in self.view.events if event["event"] == "resumed" and event["time"] > made]
            since = resumed[-1] if resumed else made
            if interrupts and not resumed:
                return None
            return next((line["time"] for line in self.view.steps if line["time"] > since and line["step"] > step), None)

        self.wait(lambda: further() is not None, f"a step after {fault}")
        training = further()
        assert training is not None
        booted = [one.boot_seconds for one in self._local.nodes() if one.instance_id not in nodes and one.boot_seconds]
        resumptions = self.view.resumptions(after=made)
        firsts = [event["time"] for event in self.events() if event["node"] not in nodes]
        return Recovery(
            fault=fault,
            at_step=step,
            heard=min((event["time"] - made for event in self.events() if is_word_of_a_fault(event, since=made)), default=None),
            training=training - made,
            after_boot=training - min(firsts) if booted and firsts else None,
            steps_lost=max((one["steps_lost"] for one in resumptions), default=0),
        )

    def finish(self) -> str:
        """Wait for the end of the run. Returns the digest of its parameters.

        Raises:
            AssertionError: it did not succeed.
        """
        self.wait(lambda: self.view.result is not None, "the end of the run")
        assert self.view.result is not None
        assert self.view.result["state"] == "succeeded", self.view.result
        worlds = {line["world"] for line in self.view.steps}
        assert worlds == {2}, f"steps were taken by {worlds} ranks"
        return next(event["model_sha256"] for event in reversed(self.view.events) if event["event"] == "finished")

    def events(self) -> list[dict[str, Any]]:
        """What all nodes have told, in order of time."""
        store = open_store(self.cluster.location)
        lines = [line for item in store.list("nodes/") for line in parse_lines(store.get(item.key))]
        return sorted(lines, key=lambda line: line["time"])

    def wait(self, condition: Callable[[], bool], what: str, *, seconds: float = 90.0) -> None:
        """Wait for a condition on the run's view.

        Raises:
            AssertionError: not met in time, with what the nodes told.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.view.refresh()
            if condition():
                return
            if time.monotonic() > deadline:
                told = "\n".join(
                    f"{one['time']:.1f} {one['node']} {one['step']} {one['state']} {one['detail']}" for one in self.events()
                )
                raise AssertionError(f"{what}: not within {seconds:g} s, at step {self.view.step}.\n{told[-6000:]}")
            time.sleep(0.2)

    def objects(self) -> list[str]:
        """All objects in the run's folder."""
        return [item.key for item in open_store(self.cluster.location).list()]

    def read(self, key: str) -> bytes:
        """One of them, which may come a moment after the result."""
        self.wait(lambda: key in self.objects(), key)
        return open_store(self.cluster.location).get(key)

    def wait_for_damage(self) -> None:
        """Until the payload in its bucket is not what the user data says."""
        bucket, key = self.cluster._payload()
        s3 = boto3.client("s3")
        tag = s3.head_object(Bucket=bucket, Key=key)["ETag"]
        self.wait(lambda: s3.head_object(Bucket=bucket, Key=key)["ETag"] != tag, "a damaged payload")

    def command(self, *arguments: str) -> str:
        """Run a command that sees the local cloud.

        Raises:
            AssertionError: it failed.
        """
        done = subprocess.run(
            list(arguments), cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    def _write(self, settings: dict[str, Any]) -> None:
        (self._directory / "cluster.yaml").write_text(json.dumps(settings))  # JSON is YAML

    def _deploy(self, stack: str) -> None:
        options = ("-c", f"settings={self._directory / 'cluster.yaml'}", "--output", str(self._directory / "out"))
        self._cdk("deploy", stack, "--exclusively", "--require-approval", "never", *options)

    def _cdk(self, *arguments: str) -> None:
        self.command(str(Path(sys.prefix, "cdk/node_modules/.bin/cdk")), *arguments)


def is_word_of_a_fault(event: dict[str, Any], *, since: float) -> bool:
    """Whether a node tells in it that something is not as usual."""
    unusual = event["state"] == "failed" or event["step"] in ("watch", "recover") or "asked to stop" in event["detail"].lower()
    return bool(event["time"] > since and unusual)


@contextmanager
def faulted(directory: Path) -> Iterator[Faulted]:
    """A local cloud with the data that runs need. The environment of this process leads to it meanwhile."""
    before = dict(os.environ)
    with trainlocal.start(directory / "local") as local:
        os.environ.update(local.environment())
        try:
            yield Faulted(directory, local)
        finally:
            os.environ.clear()
            os.environ.update(before)
