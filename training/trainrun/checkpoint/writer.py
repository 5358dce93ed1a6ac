"""The process that writes one rank's shards, beside the rank and behind it.

It is started by `trainrun.checkpoint.process`, shares the rank's arena, and is asked, and answers, by JSON lines over a
socket. It has no torch, the lowest priority, and no life of its own: when its rank is gone, so is it.

Requests:
    ``plan``    where tensors lie in the arena, whose descriptor comes with it
    ``save``    write the shard and its description
    ``commit``  rank 0's only: read all descriptions, write the COMMIT, then delete what is not kept

Answers:
    ``moved``   bytes of the shard that have been sent, now and then
    ``saved``   the shard is durable
    ``committed``  the checkpoint exists
    ``pruned``  old checkpoints are deleted, or why not
    ``failed``  why a request failed
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainrun.checkpoint.retention import Retention
from trainrun.checkpoint.write import Plan, Snapshot, commit_shards, write_shard
from trainrun.config import from_mapping
from trainrun.settings.checkpoint import CheckpointSettings
from trainrun.store import Store, StoreError, open_store

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOWEST_PRIORITY = 19
PROGRESS_SECONDS = 0.5
"""Between two reports of progress."""

Message = dict[str, Any]


def main() -> None:
    """Serve the rank at the other end of the socket whose descriptor, and whose process id, are the arguments."""
    channel, rank = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # whether the last save is finished is the rank's to decide
    if sys.platform == "linux":
        # The end of the socket tells the same, but not to a process that is stopped, nor while a child of the rank has it open.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != rank:
        return
    with suppress(OSError):
        os.nice(LOWEST_PRIORITY)
    Writer(channel).serve()


class Writer:
    """Does what the rank asks for, one request after the other."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._requests: queue.SimpleQueue[tuple[Message, int]] = queue.SimpleQueue()
        self._plan = Plan((), 0)
        self._data = memoryview(b"")
        self._store: Store | None = None
        self._retention: Retention | None = None
        self._reported = 0.0

    def serve(self) -> None:
        """Until the rank is gone, which ends the process in the midst of whatever it does."""
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            request, descriptor = self._requests.get()
            act: Callable[[Message, int], None] = {"plan": self._take_plan, "save": self._save, "commit": self._commit}[
                request["do"]
            ]
            try:
                act(request, descriptor)
            except StoreError as error:
                self._answer({"failed": str(error)})
            except Exception as error:  # whatever it is, the rank waits for the answer
                self._answer({"failed": f"{type(error).__name__}: {error}"})

    def _take_plan(self, request: Message, descriptor: int) -> None:
        self._plan = Plan.from_rows(request["slots"], request["size"])
        self._data = memoryview(mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ))
        os.close(descriptor)

    def _save(self, request: Message, _: int) -> None:
        write_shard(
            self._open(request["location"]),
            Snapshot(self._data[: self._plan.size], self._plan, request["values"]),
            step=request["step"],
            attempt=request["attempt"],
            rank=request["rank"],
            timeout_seconds=request["seconds"],
            progress=self._report,
        )
        self._answer({"saved": self._plan.size, "seconds": time.time() - request["begun"]})

    def _commit(self, request: Message, _: int) -> None:
        store = self._open(request["location"])
        begun = time.monotonic()
        commit, own = commit_shards(store, request["header"], timeout_seconds=request["seconds"])
        self._answer({"committed": commit.bytes, "own": own, "seconds": time.monotonic() - begun})
        if self._retention is None:
            self._retention = Retention(store, from_mapping(CheckpointSettings, request["settings"]))
        try:
            self._retention.prune(in_flight=[commit.attempt])
            self._answer({"pruned": ""})
        except StoreError as error:
            self._answer({"pruned": str(error)})
        except Exception as error:  # the checkpoint exists, whatever became of the old ones
            self._answer({"pruned": f"{type(error).__name__}: {error}"})

    def _open(self, location: str) -> Store:
        if self._store is None:
            self._store = open_store(location)
        return self._store

    def _listen(self) -> None:
        """Requests come here while others are at work; so does the end of the rank."""
        text = b""
        descriptors: list[int] = []
        while True:
            with suppress(OSError):
                data, received, _, _ = socket.recv_fds(self._channel, 65536, 1)
                descriptors += received
                if data:
                    *lines, text = (text + data).split(b"\n")
                    for line in lines:
                        request = json.loads(line)
                        self._requests.put((request, descriptors.pop(0) if request["do"] == "plan" else -1))
                    continue
            os._exit(0)

    def _answer(self, message: Message) -> None:
        self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _report(self, moved: int) -> None:
        """Tell how far the shard is. A rank that does not listen just now is not waited for."""
        if time.monotonic() - self._reported < PROGRESS_SECONDS:
            return
        self._reported = time.monotonic()
        with suppress(BlockingIOError):
            self._channel.send(json.dumps({"moved": moved}).encode() + b"\n", socket.MSG_DONTWAIT)
