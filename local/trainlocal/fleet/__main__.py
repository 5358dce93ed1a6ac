"""`python -m trainlocal.fleet`: the fleet's process. The janitor starts it, and it ends with its standard input."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from trainlocal.fleet import cgroups
from trainlocal.fleet.control import ControlServer, hand_over
from trainlocal.fleet.fleet import Fleet, NodeMaker
from trainlocal.fleet.instances import Account
from trainlocal.fleet.places import Places

_PASSED_TO_NODES = ("AWS_REGION", "AWS_DEFAULT_REGION")


def _isolated_nodes(places: Places, cgroup: Path | None) -> NodeMaker:
    from trainlocal.fleet import isolated  # Linux alone has what it needs
    from trainlocal.fleet.packages import image_layer

    layer = image_layer()
    if cgroup:
        own = cgroup / "fleet"
        own.mkdir()
        cgroups.join(own)
    isolated.enter_world()
    address, port = isolated.CLOUD_ADDRESS
    with socket.create_server((address, port), backlog=128) as listener:
        hand_over(places.cloud_socket, listener)
    os.environ["AWS_ENDPOINT_URL"] = f"http://{address}:{port}"
    environment = {name: os.environ[name] for name in _PASSED_TO_NODES}
    environment["AWS_ENDPOINT_URL"] = os.environ["AWS_ENDPOINT_URL"]
    return isolated.IsolatedNodes(
        mount_point=places.mount_point, layer=layer, cgroup=cgroup, shared=places.shared, environment=environment
    )


def _plain_nodes(places: Places) -> NodeMaker:
    from trainlocal.fleet.plain import PlainNodes

    # All AWS_* variables of the fleet hold, so that nothing can reach past the emulated cloud, except that ...
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    del environment["AWS_EC2_METADATA_DISABLED"]  # ... a node has its own metadata service, on loopback
    with socket.create_server(("127.0.0.1", 0)) as free:
        environment["TRAINRUN_RENDEZVOUS_PORT"] = str(free.getsockname()[1])  # all nodes share this machine's ports
    return PlainNodes(roots=places.plain_roots, environment=environment)


def _stop_with_stdin(fleet: Fleet) -> None:
    sys.stdin.buffer.read()
    fleet.stop()


def main() -> None:
    """Run the fleet until standard input closes or SIGTERM comes."""
    parser = argparse.ArgumentParser(prog="python -m trainlocal.fleet", description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--tier", required=True)
    parser.add_argument("--cgroup", type=Path)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("trainlocal").setLevel(logging.INFO)
    places = Places(arguments.directory)
    isolated = arguments.tier != "plain"
    maker = _isolated_nodes(places, arguments.cgroup) if isolated else _plain_nodes(places)
    fleet = Fleet(Account(os.environ["AWS_REGION"]), maker, places.nodes)
    signal.signal(signal.SIGTERM, lambda *_: fleet.stop())
    signal.signal(signal.SIGINT, lambda *_: fleet.stop())
    threading.Thread(target=_stop_with_stdin, args=(fleet,), daemon=True).start()
    control = ControlServer(places.fleet_socket, fleet.answer)
    fleet.watch()
    control.close()
    if not isolated:
        fleet.kill_all()  # isolated nodes end with this process, the first of their namespace


if __name__ == "__main__":
    main()
