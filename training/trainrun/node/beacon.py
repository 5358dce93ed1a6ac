"""A listening socket by which peers see that this node's agent is alive.

The port of torchrun's store would not do: it closes at every relaunch and opens only once torch is imported.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Beacon:
    """Accepts connections on a free port of one address and closes them. Use as a context manager."""

    def __init__(self, *, address: str) -> None:
        self._socket = socket.create_server((address, 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]

    def __enter__(self) -> Beacon:
        threading.Thread(target=self._accept, name="beacon", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # not on macOS
            self._socket.shutdown(socket.SHUT_RDWR)  # a socket that is being accepted on listens on after its close
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            connection.close()


def answers(address: str, port: int, *, timeout: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((address, port), timeout=timeout).close()
    except OSError:
        return False
    return True
