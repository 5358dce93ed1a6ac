"""Requests to a running process over a Unix socket: one line of JSON each way."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainlocal.socket_path import short_path

Answer = dict[str, Any]
Handler = Callable[[dict[str, Any]], Answer]


def connect(path: Path, seconds: float) -> socket.socket:
    """A connection to the socket at `path`, with a time-out for all that follows."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(seconds)
        with short_path(path) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def ask(path: Path, request: dict[str, Any], seconds: float = 30.0) -> Answer:
    """Send a request and return the answer. Raises OSError when nobody answers, ValueError with the text of an error."""
    with connect(path, seconds) as connection, connection.makefile("rw") as stream:
        stream.write(json.dumps(request) + "\n")
        stream.flush()
        line = stream.readline()
    if not line:
        raise ConnectionError(f"{path} closed without an answer")
    answer: Answer = json.loads(line)
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def hand_over(path: Path, listener: socket.socket, seconds: float = 30.0) -> None:
    """Pass a listening socket to the emulated cloud, which will serve its API there (contract of DIR/cloud.sock)."""
    with connect(path, seconds) as connection:
        socket.send_fds(connection, [b"\0"], [listener.fileno()])
        answer = json.loads(connection.makefile().readline())
    if "error" in answer:
        raise OSError(f"the emulated cloud refused the socket: {answer['error']}")


class ControlServer:
    """Answers requests with `handler`, each in a thread of its own. ValueError and LookupError become error answers."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path, self._handler = path, handler
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as address:
            self._listener.bind(address)
        path.chmod(0o600)
        self._listener.listen(16)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rw") as stream:
            for line in stream:
                try:
                    answer = self._handler(json.loads(line))
                except (ValueError, LookupError) as error:
                    answer = {"error": str(error)}
                try:
                    stream.write(json.dumps(answer) + "\n")
                    stream.flush()
                except OSError:
                    return  # the asker has gone

    def close(self) -> None:
        """Stop accepting."""
        self._listener.close()
        self._path.unlink(missing_ok=True)
