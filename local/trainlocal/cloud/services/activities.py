"""The scaling activities of Auto Scaling groups, which moto does not record."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from moto.autoscaling.models import AutoScalingBackend, FakeAutoScalingGroup
from moto.autoscaling.responses import AutoScalingResponse
from moto.core.responses import ActionResult
from moto.core.utils import utcnow

from trainlocal.cloud.services.amending import amend


def install() -> None:
    """Answers DescribeScalingActivities."""
    amend(AutoScalingResponse, "describe_scaling_activities", _describe_activities)


def activities(backend: AutoScalingBackend) -> list[dict[str, Any]]:
    """All activities of a region, the newest first."""
    recorded: list[dict[str, Any]] = backend.__dict__.setdefault("scaling_activities", [])
    return recorded


def record_activity(
    group: FakeAutoScalingGroup,
    description: str,
    *,
    status: str = "Successful",
    message: str | None = None,
    cause: str | None = None,
) -> None:
    """Adds one finished activity of a group."""
    now = utcnow()
    capacity = (
        f"the difference between desired and actual capacity was found, the desired capacity being {group.desired_capacity}"
    )
    activity = {
        "ActivityId": str(uuid4()),
        "AutoScalingGroupName": group.name,
        "AutoScalingGroupARN": group.arn,
        "Description": description,
        "Cause": f"At {now:%Y-%m-%dT%H:%M:%SZ} {cause or capacity}.",
        "StartTime": now,
        "EndTime": now,
        "StatusCode": status,
        "StatusMessage": message,
        "Progress": 100,
    }
    activities(group.autoscaling_backend).insert(0, activity)


def _describe_activities(response: AutoScalingResponse) -> ActionResult:
    name = response._get_param("AutoScalingGroupName")
    ids = response._get_param("ActivityIds", [])
    chosen = [
        activity
        for activity in activities(response.autoscaling_backend)
        if name in (None, activity["AutoScalingGroupName"]) and (not ids or activity["ActivityId"] in ids)
    ]
    return ActionResult({"Activities": chosen[: int(response._get_param("MaxRecords", 100))]})
