"""Serves the emulated account over HTTP on a loopback port and on listening sockets that others pass in."""

from __future__ import annotations

import json
import os
import socket
import struct
from pathlib import Path
from threading import Thread
from typing import Any

from moto.moto_server.werkzeug_app import MotoRequestHandler
from werkzeug.serving import BaseWSGIServer, make_server

from trainlocal.cloud.application import Application
from trainlocal.cloud.services import commands
from trainlocal.socket_path import short_path

SOCKET_NAME = "cloud.sock"
FLEET_SOCKET_NAME = "fleet.sock"
STATE_NAME = "cloud.json"


class RequestHandler(MotoRequestHandler):
    """moto's handler, quiet and without Nagle's delay (headers and body go out in two writes)."""

    disable_nagle_algorithm = True
    protocol_version = "HTTP/1.1"

    def log(self, type: str, message: str, *args: Any) -> None:
        """Logs nothing: a poll a second would fill the log."""


class CloudServer:
    """The emulated account on ``http://127.0.0.1:port`` and on every socket passed over ``directory/cloud.sock``.

    ``port`` 0 takes a free one. The directory must exist; ``cloud.json`` in it names the endpoint while the server runs.
    """

    def __init__(self, *, directory: Path, port: int = 0) -> None:
        self.application = Application()
        commands.reach_nodes(directory / FLEET_SOCKET_NAME)
        self.directory = directory
        self._servers: list[BaseWSGIServer] = []
        listening = socket.create_server(("127.0.0.1", port), backlog=128)
        self.endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self.application.clients.endpoint = self.endpoint
        self.serve(listening)
        self._passing = self._listen_for_sockets()
        self.state = {"endpoint": self.endpoint, "pid": os.getpid()}
        (directory / STATE_NAME).write_text(json.dumps(self.state) + "\n")

    def serve(self, listening: socket.socket) -> None:
        """Serves the account on one more listening TCP socket, whichever network namespace it was made in."""
        address, port = listening.getsockname()[:2]
        server = make_server(
            address, port, self.application, threaded=True, request_handler=RequestHandler, fd=listening.fileno()
        )
        listening.close()  # make_server took its own copy
        self._servers.append(server)
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True, name=f"serve {address}:{port}").start()

    def stop(self) -> None:
        """Stops serving and removes the files that name the server."""
        self._passing.close()
        for server in self._servers:
            server.shutdown()
            server.server_close()
        for name in (SOCKET_NAME, STATE_NAME):
            (self.directory / name).unlink(missing_ok=True)

    def _listen_for_sockets(self) -> socket.socket:
        path = self.directory / SOCKET_NAME
        path.unlink(missing_ok=True)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with short_path(path) as address:
            listening.bind(address)
        path.chmod(0o600)
        listening.listen()
        Thread(target=self._accept_sockets, args=(listening,), daemon=True, name="passed sockets").start()
        return listening

    def _accept_sockets(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed by stop()
                return
            with connection:
                connection.settimeout(5)
                try:
                    answer = {"serving": self._take_socket(connection)}
                except (OSError, ValueError) as error:
                    answer = {"error": str(error)}
                connection.sendall(json.dumps(answer).encode() + b"\n")

    def _take_socket(self, connection: socket.socket) -> str:
        """Receives one descriptor (SCM_RIGHTS) and serves on it; returns its address."""
        _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(struct.calcsize("i")))
        descriptors = [
            struct.unpack("i", data[: struct.calcsize("i")])[0]
            for level, kind, data in ancillary
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS
        ]
        if len(descriptors) != 1:
            raise ValueError(f"expected one descriptor of a listening TCP socket, received {len(descriptors)}")
        passed = socket.socket(fileno=descriptors[0])
        if passed.type != socket.SOCK_STREAM or not passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            passed.close()
            raise ValueError("the descriptor passed is not a listening TCP socket")
        address = "{}:{}".format(*passed.getsockname()[:2])
        self.serve(passed)
        self.application.clients.endpoint = f"http://{address}"  # where nodes with a network of their own reach it
        return address
