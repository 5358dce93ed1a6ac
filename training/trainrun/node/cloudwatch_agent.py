"""The CloudWatch agent of the image: what it is to measure and which logs it is to send; then it is started.

It sends what outlives no node otherwise: the machine's metrics, and the log of a bootstrap that failed before the node agent
could tell. An image without it trains all the same.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from trainrun.machine_metrics import EFA, GPU, GROUP_DIMENSION, INSTANCE_DIMENSION, INTERVAL_SECONDS, MACHINE, Section
from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.substeps import Done
from trainrun.spec import RunSpec

FOLDER = Path("opt/aws/amazon-cloudwatch-agent/bin")
UNIT = "amazon-cloudwatch-agent.service"
FIRST_WITH_EFA = (1, 300068)
"""Version that brought the section efa. An older agent takes no configuration that it does not know all of."""
PSEUDO_FILE_SYSTEMS = ("autofs", "devtmpfs", "efivarfs", "overlay", "squashfs", "sysfs", "tmpfs")


def configure(spec: RunSpec, *, node: str, places: Places, run: Run) -> Done:
    """Write the agent's configuration and start it with it; one that runs with the same is left alone.

    Args:
        spec: the document.
        node: the instance's id, which begins the names of its log streams.
        places: where things are.
        run: runs commands.
    """
    if not spec.monitoring.namespace:
        return Done("not wanted")
    control = places.root / FOLDER / "amazon-cloudwatch-agent-ctl"
    if not control.exists():
        return Done("the image has none: no metrics of the machine, and no logs but the node's events, in CloudWatch")
    text = json.dumps(configuration(spec, node=node, places=places, version=_version(places)), indent=2) + "\n"
    file = places.spec.with_name("cloudwatch-agent.json")
    try:
        if file.exists() and file.read_text(encoding="utf-8") == text and _is_active(run):
            return Done(f"runs, namespace {spec.monitoring.namespace}")
        file.write_text(text, encoding="utf-8")
        run(str(control), "-a", "fetch-config", "-m", "ec2", "-s", "-c", f"file:{file}")
    except (StepFailed, OSError) as failure:
        file.unlink(missing_ok=True)  # so that the next start of the agent tries again
        return Done(f"not started: {failure}")
    return Done(f"started, namespace {spec.monitoring.namespace}", changed=True)


def configuration(spec: RunSpec, *, node: str, places: Places, version: tuple[int, ...]) -> dict[str, Any]:
    """The configuration of the agent.

    Args:
        spec: the document.
        node: the instance's id.
        places: where the logs are.
        version: the agent's.
    """
    sections = list(MACHINE)
    if spec.cluster.accelerator == "nvidia":
        sections.append(GPU)
    if spec.cluster.efa_interfaces and version[:2] >= FIRST_WITH_EFA:
        sections.append(EFA)
    document: dict[str, Any] = {
        "agent": {"metrics_collection_interval": INTERVAL_SECONDS, "region": spec.region},
        "metrics": {
            "namespace": spec.monitoring.namespace,
            "append_dimensions": {name: f"${{aws:{name}}}" for name in (GROUP_DIMENSION, INSTANCE_DIMENSION)},
            "aggregation_dimensions": [[GROUP_DIMENSION], [INSTANCE_DIMENSION]],
            "metrics_collected": {section.name: _collected(section) for section in sections},
        },
    }
    if group := spec.monitoring.log_group:
        logs = {"cloud-init-output": places.root / "var/log/cloud-init-output.log", "agent": places.logs / "agent.log"}
        launcher = places.torchrun_log if spec.job.launcher == "torchrun" else places.mpirun_log
        logs[launcher.stem] = launcher
        collected = [
            {"file_path": str(path), "log_group_name": group, "log_stream_name": f"{node}/{name}", "timezone": "UTC"}
            for name, path in logs.items()
        ]
        document["logs"] = {"logs_collected": {"files": {"collect_list": collected}}}
    return document


def _collected(section: Section) -> dict[str, Any]:
    """One section. Metrics by device are dropped once they are in the aggregates, which is what CloudWatch bills by."""
    collected: dict[str, Any] = {
        "measurement": list(section.measurements),
        "drop_original_metrics": list(section.measurements),
    }
    if section.resources:
        collected["resources"] = list(section.resources)
    if section.name == "cpu":
        collected["totalcpu"] = True
    if section.name == "disk":
        collected["ignore_file_system_types"] = list(PSEUDO_FILE_SYSTEMS)
    return collected


def _version(places: Places) -> tuple[int, ...]:
    """The agent's version, such as (1, 300071, 0); () when it does not tell."""
    try:
        text = (places.root / FOLDER / "CWAGENT_VERSION").read_text(encoding="utf-8")
    except OSError:
        return ()
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _is_active(run: Run) -> bool:
    try:
        return run("systemctl", "is-active", UNIT).strip() == "active"
    except StepFailed:
        return False
