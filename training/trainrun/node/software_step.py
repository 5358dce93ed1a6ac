"""The step between prepare and check: have what the job runs with."""

from __future__ import annotations

from trainrun.node.commands import run
from trainrun.node.conda import prepare_conda
from trainrun.node.container import prepare_container
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.node.venv import prepare_venv
from trainrun.spec import RunSpec
from trainrun.store import Store


def prepare_software(spec: RunSpec, *, image: Software, places: Places, node: str, store: Store) -> tuple[Software, str]:
    """Have what the job runs with; may run again. Returns it, and what was done.

    Args:
        spec: the document.
        image: the image's own Python.
        places: where things are on this node.
        node: the instance's id.
        store: where archives of environments are kept.

    Raises:
        StepFailed: it cannot be had.
    """
    if spec.job.container:
        return prepare_container(spec, places=places, node=node, run=run)
    if spec.job.requirements:
        return prepare_venv(spec, python=image.python, places=places, store=store, run=run)
    if spec.job.conda:
        return prepare_conda(spec, places=places, store=store, run=run)
    return image, f"the image's {image.python}"
