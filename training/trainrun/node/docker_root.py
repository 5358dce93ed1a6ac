"""Docker's images on the instance store, which has more room and speed than the root volume."""

from __future__ import annotations

import json
from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.substeps import Done


def move_to_instance_store(instance_store: str, *, run: Run, configuration: Path = Path("/etc/docker/daemon.json")) -> Done:
    """Have Docker keep its images below the instance store. What it cannot move it leaves, and says so.

    Docker is restarted for that, which would end containers: it is left alone while there are any.

    Args:
        instance_store: where that is mounted.
        run: runs commands.
        configuration: Docker's own.
    """
    wanted = f"{instance_store.rstrip('/')}/docker"
    try:
        root = run("docker", "info", "--format={{.DockerRootDir}}").strip()
        if root == wanted:
            return Done(wanted)
        if run("docker", "ps", "--quiet").strip():
            return Done(f"stays at {root}, since containers run")
        before = configuration.read_text(encoding="utf-8") if configuration.exists() else None
        settings = json.loads(before or "{}")
        configuration.parent.mkdir(parents=True, exist_ok=True)
        configuration.write_text(json.dumps({**settings, "data-root": wanted}, indent=2), encoding="utf-8")
        try:
            run("systemctl", "restart", "docker")
        except StepFailed:
            if before is None:
                configuration.unlink()
            else:
                configuration.write_text(before, encoding="utf-8")
            run("systemctl", "restart", "docker")
            raise
    except (StepFailed, OSError, ValueError) as error:
        return Done(f"stays where it is: {error}")
    return Done(f"{wanted}, was {root}", changed=True)
