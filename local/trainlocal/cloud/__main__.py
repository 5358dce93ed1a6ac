"""``python -m trainlocal.cloud``: runs the emulated AWS until it is told to stop."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from threading import Event, Thread

from trainlocal.cloud.fence import fence_off


def main() -> None:
    """Starts the server, prints one line of JSON when it is ready, and waits for a signal or for its parent to go."""
    parser = argparse.ArgumentParser(prog="python -m trainlocal.cloud", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="loopback port; 0 (the default) takes a free one")
    parser.add_argument("--directory", type=Path, required=True, help="where cloud.json and cloud.sock go")
    parser.add_argument("--die-with-stdin", action="store_true", help="end when standard input closes")
    parser.add_argument("--loopback-nodes", action="store_true", help="give instances private addresses on loopback")
    arguments = parser.parse_args()
    fence_off()
    arguments.directory.mkdir(parents=True, exist_ok=True)

    from trainlocal.cloud.server import CloudServer  # after the fence: importing it imports boto3
    from trainlocal.cloud.services import loopback

    ended = Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    if arguments.loopback_nodes:
        loopback.install()
    server = CloudServer(directory=arguments.directory, port=arguments.port)
    if arguments.die_with_stdin:
        Thread(target=_wait_for_parent, args=(ended,), daemon=True, name="parent").start()
    print(json.dumps(server.state), flush=True)
    ended.wait()
    server.stop()


def _wait_for_parent(ended: Event) -> None:
    while os.read(0, 4096):  # until the parent's end of the pipe closes; a buffered read could not be left at the end
        pass
    ended.set()


if __name__ == "__main__":
    main()
