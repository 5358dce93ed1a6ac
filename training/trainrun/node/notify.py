"""Tell people that a run has ended: one message to the cluster's SNS topic, whichever node sends it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from trainrun.node.keep import moment
from trainrun.node.places import Places
from trainrun.node.ready import shortened
from trainrun.node.result import End
from trainrun.spec import RunSpec
from trainrun.store import Store, StoreError
from trainrun.words import counted

SUBJECT_LENGTH = 100
"""SNS takes no longer one, of printable ASCII without line breaks (API reference, Publish)."""
REASON_LENGTH = 3000
"""Characters of the reason in a message; all of it is in summary.json."""

log = logging.getLogger(__name__)


def notify(end: End, *, spec: RunSpec, store: Store, summary: Mapping[str, Any]) -> str:
    """Publish the end of a run, if the cluster has a topic and no other node has. Returns what to remark, or "".

    The marker ``ends/<number>.notified`` is put down first and only where there is none: a message may be lost with the node
    that was to send it, but none is sent twice.

    Args:
        end: what there is to tell.
        spec: the document.
        store: the run's folder.
        summary: see `trainrun.node.summary`.
    """
    topic = spec.monitoring.topic
    if not topic:
        return ""
    try:
        mark = json.dumps({"node": end.node, "topic": topic}).encode()
        if not store.put_new(f"ends/{end.number:06}.notified", mark):
            return ""
        config = Config(connect_timeout=5, read_timeout=10, retries={"mode": "standard", "total_max_attempts": 4})
        client = boto3.session.Session().client("sns", region_name=topic.split(":")[3], config=config)
        client.publish(TopicArn=topic, Subject=subject(end, spec), Message=message(end, spec=spec, store=store, summary=summary))
    except (BotoCoreError, ClientError, StoreError) as error:
        log.warning("The end of the run could not be told to %s: %s", topic, error)
        return f"nobody could be notified ({shortened(str(error), 300)})"
    return "the topic was notified"


def subject(end: End, spec: RunSpec) -> str:
    """Of the message: "Traincluster: llama has failed at step 1200 of 5000"."""
    where = f" at step {end.step} of {end.steps}" if end.steps else ""
    text = f"Traincluster: {spec.run} has {end.state}{where}"
    return shortened(text.encode("ascii", "replace").decode(), SUBJECT_LENGTH)


def message(end: End, *, spec: RunSpec, store: Store, summary: Mapping[str, Any]) -> str:
    """What, why, where to look, what costs on, and how to undo it, in plain sentences."""
    seconds = summary.get("wall_seconds")
    after = f" after {timedelta(seconds=round(seconds))}" if seconds else ""
    where = f" at step {end.step} of {end.steps}" if end.steps else ""
    restarts = sum(summary.get("restarts", {}).values())
    lines = [
        f"The run {spec.run} on {spec.cluster.name} ({spec.region}) has {end.state}{where}{after}, with "
        f"{counted(restarts, 'restart')} on the way.",
        f"Why: {end.reason if len(end.reason) <= REASON_LENGTH else end.reason[:REASON_LENGTH] + ' ...'}",
        _checkpoint(summary),
        f"Where to look: {store.locate('summary.json')} has all of this, {store.url}/nodes/ what each node did"
        + (f", the log group {spec.monitoring.log_group} the same" if spec.monitoring.log_group else "")
        + (f", {store.url}/failures/ what the ranks did when they hung" if summary.get("failures") else "")
        + ".",
        *_costs(end, spec),
    ]
    return "\n\n".join(lines) + "\n"


def _checkpoint(summary: Mapping[str, Any]) -> str:
    checkpoint = summary.get("checkpoint")
    if not checkpoint:
        return "There is no checkpoint of trainrun's in its folder."
    return f"The last checkpoint is of step {checkpoint['step']}: {checkpoint['url']}"


def _costs(end: End, spec: RunSpec) -> list[str]:
    """What costs on, and what a person can do about it."""
    go_on = (
        "To go on from the last checkpoint, scale the Auto Scaling group up again; to train anew, deploy with another run name."
        if end.state != "succeeded"
        else "To train on, deploy with more steps; the same run name resumes."
    )
    if end.then != "keep":
        return ["What costs on: nothing but storage. The group was scaled to zero.", go_on]
    nodes = f"{counted(len(end.nodes), 'node')} of {spec.cluster.instance_type}"
    until = f"until {moment(end.keep_until)}, and are ended then" if end.keep_until else "until somebody ends them"
    return [
        f"What costs on: {nodes} are kept for you to look at {until}.",
        "To end them now, scale the Auto Scaling group to 0. To keep them longer, on any of them: " + keep_command(240),
        f"To have them train on from the last checkpoint, delete {end_location(spec)}.",
    ]


def keep_command(minutes: int) -> str:
    """What a person types on a node, whatever Python its agent runs with."""
    return f"sudo {Places(root=Path('/')).program} keep --minutes {minutes}"


def end_location(spec: RunSpec) -> str:
    """URL of the record that ends the run."""
    return f"{spec.run_location}/result.json"
