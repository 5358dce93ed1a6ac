"""``trainrun check``: the checks that a node does before it trains, by hand.

On a node it compares with the node's own document. On any other machine it tells what is there and whether it computes, and
asks no instance metadata service.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import socket
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from trainrun.config import ConfigError
from trainrun.node.check import check, machine_checks
from trainrun.node.checks.accelerators import count_gpus, count_neuron
from trainrun.node.checks.clock import check_clock
from trainrun.node.checks.disks import check_disk
from trainrun.node.checks.efa import count_efa
from trainrun.node.checks.python import check_python
from trainrun.node.checks.runner import Check, Checked, ChecksFailed, run_checks
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, RunSpec
from trainrun.store import open_store


def add_to(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("check", help="check this machine as a node checks itself before it trains")
    parser.add_argument("--spec", metavar="FILE", help="the RunSpec document to compare with (default: the node's own, if any)")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(act=act)


def act(options: argparse.Namespace) -> int:
    """Check, and print each result. Returns 0 if all is well, 1 otherwise."""
    places = Places.from_environment()
    on_node = places.spec.exists()
    if not on_node:  # a client for S3 would ask for credentials there
        os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    document = options.spec or (places.spec if on_node else None)
    results = check_machine(found_cluster()) if document is None else check_with_spec(read_spec(Path(document)), places=places)
    if options.json:
        print(json.dumps({"ok": not any(one.fault for one in results), "checks": [dataclasses.asdict(one) for one in results]}))
    else:
        for one in results:
            print(f"{'FAIL' if one.fault else 'ok  '} {one}")
        if document is None:
            print("There is no document of a run here: nothing was compared with what a node should have.", file=sys.stderr)
    return 1 if any(one.fault for one in results) else 0


def read_spec(file: Path) -> RunSpec:
    """Read the document to compare with.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return RunSpec.from_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{file} cannot be read: {error.strerror}. Give a RunSpec document, as a node has it."]) from None


def check_with_spec(spec: RunSpec, *, places: Places) -> list[Checked]:
    """All that the agent checks."""
    from trainrun.node.software_step import prepare_software  # needs boto3, which a machine without a document may lack

    os.environ.setdefault("AWS_DEFAULT_REGION", spec.region)
    node = f"check-{socket.gethostname()}"
    store, key = open_store(spec.run_location), f"nodes/{node}.jsonl"
    image = Software(os.environ.get("TRAINCLUSTER_PYTHON") or spec.job.python)
    environments = open_store(spec.storage.location).child("software")
    try:
        software, _ = prepare_software(spec, image=image, places=places, node=node, store=environments)
    except StepFailed as failure:
        return [Checked(name="software", seconds=0.0, fault=str(failure))]
    try:
        return check(
            spec=spec,
            software=software,
            places=places,
            node=node,
            store=store,
            key=key,
            send=lambda: store.put(key, b"{}\n"),
        )
    except ChecksFailed as failure:
        return list(failure.results)
    finally:
        software.clear()


def check_machine(cluster: ClusterSpec) -> list[Checked]:
    """What can be looked at without a document: the accelerators that are there, with this Python's torch; disks; the clock."""
    folders = dict.fromkeys((Path.cwd(), Path(tempfile.gettempdir())))
    return run_checks(
        [
            *machine_checks(cluster),
            Check("torch", lambda: check_python(Software(sys.executable), cluster)),
            *(Check(f"disk {folder}", partial(check_disk, folder, node=str(os.getpid()))) for folder in folders),
            Check("clock", lambda: check_clock("")),
        ]
    )


def found_cluster() -> ClusterSpec:
    """A description of this machine by what its drivers show, so that torch and libfabric have to show the same."""
    gpus, chips = count_gpus()[0], count_neuron()
    return ClusterSpec(
        name="by hand",
        instance_type="this machine",
        nodes_min=1,
        nodes_desired=1,
        nodes_max=1,
        accelerator="nvidia" if gpus else "neuron" if chips else "none",
        accelerators_per_node=gpus or chips,
        efa_interfaces=count_efa(),
    )
