"""The face of trainlocal: start an emulated AWS whose instances are nodes on this machine, and look at it."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from trainlocal.environment import cdk_environment, cloud_environment, inherited
from trainlocal.fleet.control import ask
from trainlocal.fleet.imds import Failure
from trainlocal.fleet.places import Places
from trainlocal.fleet.plain import MARK
from trainlocal.fleet.tiers import Tier

_READY_SECONDS = 90.0
_END_SECONDS = 60.0


class LocalError(RuntimeError):
    """The local cloud could not be started or reached. The text is a sentence for users."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of the local cloud.

    Attributes:
        instance_id: the id of its EC2 instance.
        address: the instance's private IPv4 address.
        state: "booting", "running" (cloud-init is done), "failed" (cloud-init reports errors), "ending" or "dead".
        pid: the pid here of the node's starting process (isolated tiers) or of one of its processes (plain); None when dead.
        boot_seconds: from the start of the node to the end of cloud-init; None before that.
        detail: what cloud-init complained of, or why the node is dead.
        logs: the folder with its console and what its /var/log holds.
    """

    instance_id: str
    address: str
    state: str
    pid: int | None
    boot_seconds: float | None
    detail: str
    logs: Path


class Local:
    """A running local cloud. As a context manager it is stopped at the end of the block, unless it was detached.

    Attributes:
        endpoint: URL of the emulated AWS API on 127.0.0.1.
        tier: the kind of nodes: "isolated-root", "isolated-user" or "plain".
        description: what the nodes are, in words.
        reason: why it is this tier.
    """

    def __init__(self, places: Places, state: dict[str, Any], janitor: subprocess.Popen[bytes] | None) -> None:
        self._places, self._janitor = places, janitor
        self._fleet_pid: int = state["fleet"]
        self.endpoint: str = state["endpoint"]
        self.tier: Tier = state["tier"]
        self.description: str = state["description"]
        self.reason: str = state["reason"]

    def __enter__(self) -> Local:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._janitor is not None:
            self.stop()

    def environment(self) -> dict[str, str]:
        """Every variable that the cdk CLI, an app that it runs, and boto3 need to see this cloud and nothing else."""
        return {**cloud_environment(self.endpoint), **cdk_environment(self._places.cdk_home)}

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command that sees this cloud, and that ends with it together with all that the command starts.

        Args:
            command: the program and its arguments.
            options: what subprocess.Popen takes besides; standard output and error are text.
        """
        environment = {**inherited(), **self.environment(), MARK: str(self._places.commands)}
        return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **options)

    def resources(self) -> dict[str, list[str]]:
        """Names of all that exists in the emulated account, by kind, as the services themselves list it."""
        with urllib.request.urlopen(f"{self.endpoint}/_traincluster/resources", timeout=30) as answer:
            found: dict[str, list[str]] = json.load(answer)
        return found

    def nodes(self) -> list[Node]:
        """All nodes that were ever booted, in the order of their start. Raises LocalError when the fleet is gone."""
        statuses = self._ask({"do": "nodes"})["nodes"]
        pids = _host_pids(self._fleet_pid) if self.tier != "plain" else {}
        for status in statuses:
            status["pid"] = pids.get(status["pid"], status["pid"])
        return [Node(**status, logs=self._places.nodes / status["instance_id"]) for status in statuses]

    def kill(self, instance_id: str) -> None:
        """End a node as a power cut would: SIGKILL of its whole namespace. Raises LocalError for an unknown node."""
        self._ask({"do": "kill", "instance_id": instance_id})

    def set_metadata(self, instance_id: str, path: str, content: str | None) -> None:
        """Set or (None) remove an item of a node's metadata, for example `meta-data/spot/instance-action`."""
        self._ask({"do": "metadata", "instance_id": instance_id, "path": path, "content": content})

    def fail_metadata(self, instance_id: str, how: Failure | None) -> None:
        """Have a node's metadata service answer each request with 500 ("error") or none ("silence"), or (None) work again."""
        self._ask({"do": "fail_metadata", "instance_id": instance_id, "how": how})

    def run(self, instance_id: str, script: str, *, seconds: float = 60.0) -> str:
        """Run a shell script as root of a node. Returns its standard output.

        Raises:
            LocalError: it failed, or ran for longer; the text has what it said.
        """
        done = self._ask({"do": "run", "instance_id": instance_id, "script": script, "seconds": seconds})
        if done["code"] != 0:
            how = f"more than {seconds:g} s" if done["code"] is None else f"exit code {done['code']}"
            raise LocalError(f"a script on {instance_id} ended with {how}: {done['stderr'].strip() or done['stdout'].strip()}")
        return str(done["stdout"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return ask(self._places.fleet_socket, request)
        except ValueError as error:
            raise LocalError(str(error)) from None
        except OSError as error:
            raise LocalError(
                f"the fleet in {self._places.directory} does not answer ({error}); see {self._places.logs}"
            ) from None

    def detach(self) -> None:
        """Leave it running when this process ends; `python -m trainlocal down` ends it then."""
        if self._janitor is not None:
            assert self._janitor.stdin is not None
            self._janitor.stdin.write(b"k")
            self._janitor.stdin.close()
            self._janitor.returncode = 0  # it outlives us: nobody is to wait for it
            self._janitor = None

    def stop(self) -> None:
        """End nodes, fleet and cloud, and wait until nothing is left of them but the logs."""
        if self._janitor is None:
            stop_detached(self._places)
            return
        _end(self._janitor)


def _host_pids(fleet: int) -> dict[int, int]:
    """pid in the fleet's namespace -> pid here, for the processes that the fleet has started."""
    found: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except OSError:
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
        pids = fields.get("NSpid", "").split()
        if len(pids) >= 2 and _has_ancestor(int(pids[0]), fleet):
            found[int(pids[1])] = int(pids[0])
    return found


def _has_ancestor(pid: int, ancestor: int) -> bool:
    while pid > 1:
        if pid == ancestor:
            return True
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return False


def _end(janitor: subprocess.Popen[bytes]) -> None:
    assert janitor.stdin is not None and janitor.stdout is not None
    janitor.stdin.close()
    try:
        janitor.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        raise LocalError(f"the janitor (pid {janitor.pid}) has not ended after {_END_SECONDS:.0f} s") from None
    finally:
        janitor.stdout.close()


def start(directory: Path, tier: Tier | None = None) -> Local:
    """Start the emulated cloud and its fleet; use the result as a context manager, or call `stop` or `detach`.

    Everything ends with this process, however it ends, unless `detach` was called.

    Args:
        directory: a folder for state, sockets and logs; it is made when it is missing.
        tier: the kind of nodes; the best one that this machine allows by default ($TRAINLOCAL_TIER too can name one).

    Raises:
        LocalError: a local cloud runs in the folder already, or it could not be started (the text says why).
    """
    places = Places(Path(directory).resolve())
    if is_up(places.directory):
        raise LocalError(f"a local cloud is running in {places.directory} already; end it with: python -m trainlocal down")
    places.logs.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "trainlocal.janitor", "--directory", str(places.directory)]
    if tier:
        command += ["--tier", tier]
    with (places.logs / "janitor.log").open("ab") as log:
        janitor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            bufsize=0,
            env=_with_own_path(),
            start_new_session=True,
        )
    try:
        state = _first_report(janitor, places)
    except BaseException:
        _end(janitor)
        raise
    return Local(places, state, janitor)


def _with_own_path() -> dict[str, str]:
    """This environment, in which `python -m trainlocal...` finds the package wherever this process found it."""
    source = str(Path(__file__).resolve().parents[1])
    path = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(path))}


def _first_report(janitor: subprocess.Popen[bytes], places: Places) -> dict[str, Any]:
    assert janitor.stdout is not None
    readable, _, _ = select.select([janitor.stdout], [], [], _READY_SECONDS)
    line = janitor.stdout.readline() if readable else b""
    if not line:
        raise LocalError(f"the local cloud did not start; see the logs in {places.logs}")
    state: dict[str, Any] = json.loads(line)
    if "error" in state:
        raise LocalError(f"the local cloud did not start: {state['error']}")
    return state


def attach(directory: Path) -> Local:
    """The local cloud that runs in `directory` (started by another process). Raises LocalError when there is none."""
    places = Places(Path(directory).resolve())
    if not is_up(places.directory):
        raise LocalError(f"no local cloud is running in {places.directory}; start one with: python -m trainlocal up")
    return Local(places, json.loads(places.state.read_text()), None)


def is_up(directory: Path) -> bool:
    """Whether a local cloud runs in the folder: its janitor answers."""
    try:
        ask(Places(Path(directory).resolve()).janitor_socket, {"do": "are you there"}, seconds=5)
    except ValueError:
        return True  # it answered that it knows no such request
    except OSError:
        return False
    return True


def stop_detached(places: Places) -> None:
    """Have the janitor in `places` end everything, and wait for it."""
    try:
        ask(places.janitor_socket, {"do": "down"}, seconds=_END_SECONDS)
    except (OSError, ValueError) as error:
        raise LocalError(f"the local cloud in {places.directory} did not end: {error}") from None
