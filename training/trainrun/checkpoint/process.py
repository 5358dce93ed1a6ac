"""The rank's end of its writer (`trainrun.checkpoint.writer`): starts it, asks it, hears it, ends it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import trainrun
from trainrun.errors import CheckpointError

KILL_SECONDS = 5.0
"""How long a killed process may take to be gone; one in the midst of a call to a dead file system takes longer."""

Message = dict[str, Any]


class WriterEnded(CheckpointError):
    """The process has ended, or does not take requests any more."""


class WriterProcess:
    """One writer. Its stderr is the rank's."""

    def __init__(self) -> None:
        """Raises:
        OSError: it could not be started.
        """
        self._socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    # -c and not -m, which would let files of the folder that training runs in stand for Python's own modules
                    [sys.executable, "-c", PROGRAM, str(theirs.fileno()), str(os.getpid()), str(_package_folder())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # signals to the rank's group are the rank's to answer
                )
            except BaseException:
                self._socket.close()
                raise
        self._socket.setblocking(False)
        self._text = b""
        self.plan: object = None
        """What the last `plan` request was made of; the rank's to remember."""
        self._finalizer = weakref.finalize(self, _close, self._process, self._socket)

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def ask(self, request: Message, *, descriptors: Sequence[int] = (), seconds: float) -> None:
        """Send a request.

        Args:
            request: see `trainrun.checkpoint.writer`.
            descriptors: of files that go with it.
            seconds: how long the writer may take to receive it.

        Raises:
            WriterEnded: it did not.
        """
        data = memoryview(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + seconds
        try:
            while data:
                try:
                    sent = socket.send_fds(self._socket, [data], list(descriptors))
                except BlockingIOError:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise WriterEnded(f"its writer (process {self.pid}) does not take requests") from None
                    self._ready(select.POLLOUT, left)
                    continue
                data, descriptors = data[sent:], ()
        except OSError:
            raise WriterEnded(self._how_it_ended()) from None

    def answers(self) -> list[Message]:
        """What it has said since the last call, without waiting.

        Raises:
            WriterEnded: it has ended, and everything it said was heard.
        """
        ended = False
        while True:
            try:
                data = self._socket.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                ended = True
                break
            self._text += data
        *lines, self._text = self._text.split(b"\n")
        if ended and not lines:
            raise WriterEnded(self._how_it_ended())
        return [json.loads(line) for line in lines]

    def wait(self, seconds: float) -> None:
        """Until it says something or ends, at most so long."""
        self._ready(select.POLLIN, seconds)

    def end(self) -> None:
        """End the process. Who is in `ask` just now, in another thread, gets `WriterEnded`."""
        _end(self._process, self._socket)

    def close(self) -> None:
        """Leave nothing behind; nobody may use this object any more."""
        self._finalizer()

    def _ready(self, for_what: int, seconds: float) -> None:
        poll = select.poll()  # and not select(), which cannot do descriptors above 1023
        poll.register(self._socket, for_what)
        poll.poll(max(0.0, seconds) * 1000)

    def _how_it_ended(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return f"its writer (process {self.pid}) ended {how}"
        return f"its writer (process {self.pid}) has closed its connection"


PROGRAM = """
import sys
del sys.path[0]
if sys.argv[3] not in sys.path:
    sys.path.insert(0, sys.argv[3])
from trainrun.checkpoint.writer import main
main()
"""


def _package_folder() -> Path:
    """The folder that this very trainrun is imported from: a source tree, site-packages or a node's payload."""
    return Path(trainrun.__file__).resolve().parent.parent


def _end(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    process.kill()
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)


def _close(process: subprocess.Popen[bytes], channel: socket.socket) -> None:
    _end(process, channel)
    channel.close()
