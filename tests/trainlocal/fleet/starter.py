"""Starts a local cloud with a group of two nodes, tells its phases on standard output, and waits to be interrupted.

`starter.py DIRECTORY TIER [detach]`: a line for each phase; "detach" leaves the cloud running and ends.
"""

import os
import sys
import time
from pathlib import Path

import boto3
from cycle import SERVICES, make_group

import trainlocal


def main(directory, tier, *options):
    print("starting", flush=True)
    with trainlocal.start(Path(directory), tier) as local:
        print("up", flush=True)
        if "detach" in options:
            local.detach()
            return  # through the end of the block, which is to leave it running
        os.environ.update(local.environment())
        make_group({name: boto3.client(name) for name in SERVICES}, 2)
        phase, deadline = "", time.monotonic() + 60  # by then the test has interrupted it
        while True:
            assert time.monotonic() < deadline, local.nodes()
            states = {node.state for node in local.nodes()}
            now = "running" if states == {"running"} else "booting" if "booting" in states else ""
            if now and now != phase:
                print(now, flush=True)
                phase = now
            time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
