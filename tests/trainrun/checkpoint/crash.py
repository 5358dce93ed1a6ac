"""Saves by writers that can be killed in the midst of them: what `test_crash` drives.

The writers are processes that do what `trainrun.checkpoint.writer` does, forked from a clean one because starting Python for
each takes longer than a save. The test stands for their ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from trainrun import s3_upload
from trainrun.checkpoint.arena import Arena
from trainrun.checkpoint.parts import Part
from trainrun.checkpoint.write import Plan
from trainrun.checkpoint.writer import Writer
from trainrun.config import to_mapping
from trainrun.settings.checkpoint import CheckpointSettings

PROCESSES = multiprocessing.get_context("forkserver")
WORLD = 2
PART_SIZE = 1024
"""Of uploads to S3, so that a shard of a few kilobytes has several."""
ELEMENTS = 600
"""Of each rank's slice: 2400 bytes, which are three parts."""
KEEP = 2
LONGEST = 30.0
"""Seconds that an answer may take."""

CHANGES = {"os.mkdir": 0, "os.rename": 1, "os.link": 1, "os.remove": 0, "os.rmdir": 0, "open": 0}
"""What changes a directory, as Python's audit events call it, and which of the arguments says where."""


class Lost(Exception):
    """The writer is gone."""


class RankWriter:
    """One rank's writer, and the rank's end of it."""

    def __init__(self, rank: int, *, folder: str = "", changes: int | None = None) -> None:
        """Start it; it kills itself before it changes something below ``folder`` after so many ``changes``."""
        self.rank = rank
        self.channel, theirs = socket.socketpair()
        with theirs:
            environment = {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
            self.process = PROCESSES.Process(target=_serve, args=(theirs, environment, folder, changes), daemon=True)
            self.process.start()
        self.channel.settimeout(LONGEST)
        self._answers = self.channel.makefile("r")
        self._arena = Arena(4 * ELEMENTS, torch.device("cpu"))

    def save(self, url: str, step: int, attempt: str) -> None:
        """Write the shard; returns when it is durable."""
        start, tensor = self.rank * ELEMENTS, torch.full((ELEMENTS,), float(step))
        plan = Plan.of([Part("model/w", tensor, (WORLD * ELEMENTS,), (start,))])
        self._arena.bytes[: tensor.nbytes] = tensor.view(torch.uint8)
        self._ask({"do": "plan", "size": plan.size, "slots": plan.slots}, self._arena.descriptor)
        request = {"do": "save", "location": url, "step": step, "attempt": attempt, "rank": self.rank, "values": {}}
        self._ask({**request, "seconds": LONGEST, "begun": time.time()})
        self.hear("saved")

    def commit(self, url: str, step: int, attempt: str) -> None:
        """Make it a checkpoint, and delete what is not kept."""
        header = {"run": "run", "step": step, "attempt": attempt, "time": time.time(), "world": WORLD, "tokens": step}
        header |= {"mesh": {"shard": WORLD}, "data": {}, "settings": {}, "versions": {}}
        settings = to_mapping(CheckpointSettings(keep=KEEP))
        self._ask({"do": "commit", "location": url, "header": header, "settings": settings, "seconds": LONGEST})

    def hear(self, name: str) -> Any:
        """What it answers next, which is to be this."""
        while True:
            try:
                line = self._answers.readline()
            except OSError:
                line = ""
            if not line:
                raise Lost
            answer = json.loads(line)
            if "moved" not in answer:
                assert name in answer, answer
                return answer[name]

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def abandon(self) -> None:
        """Be gone, as a rank that was killed."""
        self.channel.shutdown(socket.SHUT_RDWR)

    def _ask(self, request: dict[str, Any], *descriptors: int) -> None:
        try:
            socket.send_fds(self.channel, [json.dumps(request).encode() + b"\n"], descriptors)
        except OSError:
            raise Lost from None


@contextmanager
def writer(rank: int, **keywords: Any) -> Iterator[RankWriter]:
    """One that does not outlive the context."""
    started = RankWriter(rank, **keywords)
    try:
        yield started
    finally:
        started.kill()


def save(writers: Sequence[RankWriter], url: str, step: int, attempt: str) -> Iterator[str]:
    """One save, in a fixed order: rank 1 writes before rank 0. Tells what is done; raises `Lost` when a writer is."""
    first = writers[0]
    for each in reversed(writers):
        each.save(url, step, attempt)
        yield f"shard {each.rank}"
    first.commit(url, step, attempt)
    first.hear("committed")
    yield "committed"
    assert first.hear("pruned") == ""
    yield "pruned"


def _serve(channel: socket.socket, environment: dict[str, str], folder: str, changes: int | None) -> None:
    os.environ.update(environment)
    s3_upload.PART_SIZE = PART_SIZE
    if changes is not None:
        _die_before_change(folder, changes)
    Writer(channel).serve()


def _die_before_change(folder: str, left: int) -> None:
    counter = [left]

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        where = CHANGES.get(event)
        if where is None or (event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        if str(arguments[where]).startswith(folder):
            if counter[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            counter[0] -= 1

    sys.addaudithook(watch)
