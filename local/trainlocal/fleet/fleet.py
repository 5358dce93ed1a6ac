"""The fleet: a node for every live instance of the emulated Auto Scaling groups, and none for any other."""

from __future__ import annotations

import json
import logging
import subprocess
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from trainlocal.fleet.imds import LIFECYCLE, MetadataServer
from trainlocal.fleet.instances import Account, Instance

NodeState = Literal["booting", "running", "failed", "ending", "dead"]

_WATCH_SECONDS = 0.5
_SHUT_DOWN_SECONDS = 10.0  # what a terminated node has to end by itself before it is killed

_log = logging.getLogger("trainlocal.fleet")


@dataclass(frozen=True, kw_only=True)
class NodeCommand:
    """How a script is run in a node: as its root, with its view of files, processes and network."""

    arguments: list[str]
    environment: dict[str, str]
    folder: Path

    def run(self, seconds: float) -> dict[str, Any]:
        """Run it to its end, for at most so long. `code` is None when that was too short. What it left behind lives on."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:  # a pipe would wait for what it left behind
            process = subprocess.Popen(
                self.arguments,
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                code = None
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return {"code": code, "stdout": texts[0], "stderr": texts[1]}


class RunningNode(Protocol):
    """What the fleet needs of a node, whatever it is made of."""

    metadata: MetadataServer

    @property
    def pid(self) -> int: ...
    def has_ended(self) -> bool: ...
    def boot_result(self) -> str | None: ...
    def end(self) -> None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def command(self, script: str) -> NodeCommand: ...


class NodeMaker(Protocol):
    """Boots nodes of one tier."""

    def boot(self, instance: Instance, folder: Path) -> RunningNode: ...


@dataclass(kw_only=True)
class NodeStatus:
    """A node as it is reported: `pid` in the fleet's own PID namespace, `boot_seconds` to the end of cloud-init."""

    instance_id: str
    address: str
    state: NodeState
    pid: int | None = None
    boot_seconds: float | None = None
    detail: str = ""


class _Member:
    def __init__(self, instance: Instance) -> None:
        self.status = NodeStatus(instance_id=instance.id, address=instance.address, state="booting")
        self.node: RunningNode | None = None
        self.started = time.monotonic()
        self.kill_at: float | None = None
        self.told = False

    def report(self) -> dict[str, Any]:
        """The status as it is told to others."""
        self.status.pid = self.node.pid if self.node is not None and self.status.state != "dead" else None
        return asdict(self.status)

    def note_boot(self) -> None:
        """Take note of cloud-init's result, if there is one."""
        assert self.node is not None
        text = self.node.boot_result()
        if text is None or self.status.state != "booting":
            return
        try:
            errors = json.loads(text)["v1"]["errors"]
        except (ValueError, LookupError):
            return  # half written; the next look will do
        self.status.boot_seconds = round(time.monotonic() - self.started, 2)
        self.status.state = "failed" if errors else "running"
        self.status.detail = "; ".join(errors)


class Fleet:
    """Watches the account and keeps the nodes in step with it. One thread runs `watch`; requests may come from others."""

    def __init__(self, account: Account, maker: NodeMaker, nodes_folder: Path) -> None:
        """`nodes_folder` gets one folder of logs a node."""
        self._account, self._maker, self._folder = account, maker, nodes_folder
        self._members: dict[str, _Member] = {}
        self._lock = threading.RLock()
        self._stopped = threading.Event()

    def watch(self) -> None:
        """Keep watching until `stop`."""
        while not self._stopped.is_set():
            try:
                self._boot_and_end()
            except Exception:  # the cloud may be slow or ending: the fleet goes on, and the log says what happened
                _log.exception("a look at the account failed")
            self._stopped.wait(_WATCH_SECONDS)

    def stop(self) -> None:
        """Have `watch` return."""
        self._stopped.set()

    def _boot_and_end(self) -> None:
        live, leaving = self._account.live(), self._account.leaving()
        with self._lock:
            for instance_id, raw in live.items():
                if instance_id not in self._members:
                    self._boot(raw)
            for instance_id, member in self._members.items():
                if member.status.state != "dead":
                    self._look_after(member, is_live=instance_id in live)
                    self._tell(member, leaving)

    def _boot(self, raw: dict[str, Any]) -> None:
        instance = self._account.describe(raw)
        member = self._members[instance.id] = _Member(instance)
        _log.info("%s boots at %s", instance.id, instance.address)
        try:
            member.node = self._maker.boot(instance, self._folder / instance.id)
        except Exception as error:  # whatever it is, the group is to replace the instance
            _log.exception("%s could not be started", instance.id)
            member.status.detail = f"could not be started: {error}"

    def _look_after(self, member: _Member, is_live: bool) -> None:
        node, status = member.node, member.status
        if node is None:
            self._bury(member, status.detail)
        elif node.has_ended():
            self._bury(member, "terminated" if not is_live else "ended by itself or was killed")
        elif is_live:
            member.note_boot()
        elif member.kill_at is None:
            _log.info("%s is asked to shut down", status.instance_id)
            member.kill_at = time.monotonic() + _SHUT_DOWN_SECONDS
            status.state = "ending"
            node.end()
        elif time.monotonic() > member.kill_at:
            node.kill()

    def _tell(self, member: _Member, leaving: set[str]) -> None:
        """Tell a node once that its group ends it."""
        if member.node is not None and not member.told and member.status.instance_id in leaving:
            _log.info("%s is about to be ended by its group", member.status.instance_id)
            member.node.metadata.set(LIFECYCLE, "Terminated")
            member.told = True

    def _bury(self, member: _Member, why: str) -> None:
        status = member.status
        if why != "terminated":
            self._account.terminate(status.instance_id)  # first: when it fails, the next look comes here again
        _log.info("%s is dead: %s", status.instance_id, why)
        status.state, status.detail = "dead", why
        if member.node is not None:
            member.node.close()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request from outside: {"do": "nodes" | "kill" | "metadata" | "fail_metadata" | "run", ...}."""
        if request["do"] == "run":
            with self._lock:
                command = self._node(request["instance_id"]).command(request["script"])
            return command.run(request["seconds"])  # without the lock: the fleet goes on meanwhile
        with self._lock:
            action = request["do"]
            if action == "nodes":
                return {"nodes": [member.report() for member in self._members.values()]}
            node = self._node(request["instance_id"])
            if action == "kill":
                node.kill()
            elif action == "metadata":
                node.metadata.set(request["path"], request["content"])
            elif action == "fail_metadata":
                node.metadata.fail(request["how"])
            else:
                raise ValueError(
                    f"the fleet knows no request {action!r}; it answers nodes, kill, metadata, fail_metadata and run"
                )
            return {}

    def _node(self, instance_id: str) -> RunningNode:
        member = self._members.get(instance_id)
        if member is None or member.node is None or member.status.state == "dead":
            living = [name for name, other in self._members.items() if other.status.state != "dead"]
            raise ValueError(f"there is no running node {instance_id!r}; running are: {', '.join(living) or 'none'}")
        return member.node

    def kill_all(self) -> None:
        """End every node at once."""
        with self._lock:
            for member in self._members.values():
                if member.node is not None and member.status.state != "dead":
                    member.node.kill()
