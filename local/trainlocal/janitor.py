"""The janitor: starts the emulated cloud and the fleet, and clears all of it away when its starter is gone.

A small process in a session of its own, so that neither Ctrl-C nor SIGKILL of the starter reaches it. Its standard
input is a pipe that the starter holds: when that closes, for whatever reason and at whatever moment, everything
ends. A byte "k" on the pipe means "keep": then only the request "down" on its socket (or SIGTERM) ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from trainlocal.environment import cloud_environment, inherited
from trainlocal.fleet import cgroups
from trainlocal.fleet.control import ControlServer, ask
from trainlocal.fleet.places import Places
from trainlocal.fleet.plain import kill_all
from trainlocal.fleet.tiers import Tier, TierChoice, choose

_CGROUP_PREFIX = "trainlocal-"
_LOOK_SECONDS = 0.05
_READY_SECONDS = 60.0
_END_SECONDS = 15.0


class Ended(Exception):
    """It is time to end: the starter is gone, or somebody asked for it."""


class Janitor:
    """Starts everything and ends everything."""

    def __init__(self, places: Places, tier: Tier | None) -> None:
        self._places, self._tier = places, tier
        self._starter = os.getppid()
        self._kept = False
        self._asked_to_end = threading.Event()
        self._cleared = threading.Event()
        self._children: list[subprocess.Popen[bytes]] = []
        self._cgroup: Path | None = None

    def run(self) -> int:
        """Start, report on standard output, look after it until the end, clear away. Returns the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._asked_to_end.set())
        status = 0
        try:
            state = self._start()
            self._report(state)
            while True:
                self._look()
                time.sleep(_LOOK_SECONDS)
        except Ended as reason:
            print(f"trainlocal: ending: {reason}", file=sys.stderr, flush=True)
        except (OSError, ValueError, RuntimeError) as error:
            self._report({"error": str(error)})
            status = 1
        finally:
            self._clear()
        return status

    def _report(self, message: dict[str, Any]) -> None:
        try:
            print(json.dumps(message), flush=True)
        except OSError:
            raise Ended("the starter is gone") from None

    # starting

    def _start(self) -> dict[str, Any]:
        places = self._places
        for folder in (places.run, places.nodes):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (places.run, places.nodes, places.mount_point, places.shared, places.plain_roots, places.cdk_home):
            folder.mkdir(parents=True)
        self._control = ControlServer(places.janitor_socket, self._answer)
        choice = choose(self._tier)
        if choice.systemd:
            cgroups.remove_abandoned(_CGROUP_PREFIX)
            self._cgroup = cgroups.make(f"{_CGROUP_PREFIX}{os.getpid()}")
        endpoint = self._start_cloud(choice)
        self._start_fleet(choice, endpoint)
        state = {
            "endpoint": endpoint,
            "tier": choice.tier,
            "description": choice.description,
            "reason": choice.reason,
            "janitor": os.getpid(),
            "fleet": self._children[-1].pid,
        }
        unfinished = places.state.with_suffix(".new")
        unfinished.write_text(json.dumps(state, indent=1) + "\n")
        unfinished.replace(places.state)
        return state

    def _start_cloud(self, choice: TierChoice) -> str:
        command = ["trainlocal.cloud", "--port", "0", "--directory", str(self._places.run), "--die-with-stdin"]
        if choice.tier == "plain":
            command.append("--loopback-nodes")
        cloud = self._spawn("cloud", command, stdout=subprocess.PIPE)
        assert cloud.stdout is not None
        output = cloud.stdout
        self._wait_for(lambda: bool(select.select([output], [], [], 0)[0]), "the emulated cloud to start")
        line = output.readline()
        if not line:
            raise RuntimeError(f"the emulated cloud ended while it started; see the logs in {self._places.logs}")
        endpoint: str = json.loads(line)["endpoint"]
        return endpoint

    def _start_fleet(self, choice: TierChoice, endpoint: str) -> None:
        command = ["trainlocal.fleet", "--directory", str(self._places.directory), "--tier", choice.tier]
        if self._cgroup:
            command += ["--cgroup", str(self._cgroup)]
        self._spawn("fleet", command, environment=cloud_environment(endpoint))
        self._wait_for(self._fleet_answers, "the fleet to start")

    def _fleet_answers(self) -> bool:
        try:
            ask(self._places.fleet_socket, {"do": "nodes"}, seconds=5)
        except OSError:
            return False
        return True

    def _spawn(
        self, name: str, module: list[str], environment: dict[str, str] | None = None, stdout: int | None = None
    ) -> subprocess.Popen[bytes]:
        with (self._places.logs / f"{name}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", *module],
                stdin=subprocess.PIPE,  # closes when this process ends, and with it the child
                stdout=stdout or log,
                stderr=log,
                env={**inherited(), **(environment or {})},
            )
        self._children.append(child)
        return child

    def _wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _READY_SECONDS
        while not condition():
            self._look()
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {_READY_SECONDS:.0f} s for {what}; see the logs in {self._places.logs}")
            time.sleep(0.02)

    # looking after it

    def _look(self) -> None:
        """Raise Ended when it is time to end, RuntimeError when a part has ended by itself."""
        if self._asked_to_end.is_set():
            raise Ended("somebody asked for it")
        if not self._kept:
            self._look_at_the_starter()
        for child, name in zip(self._children, ("the emulated cloud", "the fleet"), strict=False):
            if child.poll() is not None:
                log = self._places.logs
                raise RuntimeError(f"{name} ended by itself with status {child.returncode}; see the logs in {log}")

    def _look_at_the_starter(self) -> None:
        if select.select([0], [], [], 0)[0]:
            if os.read(0, 1) != b"k":
                raise Ended("the starter is gone")
            self._kept = True
        elif os.getppid() != self._starter:  # a child that the starter forked may hold the pipe open
            raise Ended("the starter is gone")

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] != "down":
            raise ValueError(f"the janitor knows no request {request['do']!r}; it answers down")
        self._asked_to_end.set()
        if not self._cleared.wait(3 * _END_SECONDS):
            raise ValueError("it has not ended in time")
        return {}

    # ending

    def _clear(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._end_children()
        for marked in (self._places.commands, self._places.plain_roots):
            kill_all(marked)
        if self._cgroup:
            cgroups.remove(self._cgroup)
        shutil.rmtree(self._places.run, ignore_errors=True)
        self._places.state.unlink(missing_ok=True)
        self._cleared.set()
        time.sleep(0.1 if self._kept else 0)  # the answer to "down" is on its way, in a thread that ends with us

    def _end_children(self) -> None:
        """The cloud holds nothing that is worth a farewell; the fleet is given time to see its nodes gone."""
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
        cloud, fleet = [*self._children, None, None][:2]
        if cloud is not None:
            cloud.kill()
            cloud.wait()
        if fleet is not None:
            fleet.terminate()
            try:
                fleet.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                fleet.kill()
                fleet.wait()


def main() -> NoReturn:
    """Run the janitor."""
    parser = argparse.ArgumentParser(prog="python -m trainlocal.janitor", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--tier")
    arguments = parser.parse_args()
    sys.exit(Janitor(Places(arguments.directory), arguments.tier).run())


if __name__ == "__main__":
    main()
