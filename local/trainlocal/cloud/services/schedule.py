"""Scheduled actions of Auto Scaling groups, which moto records and never takes."""

from __future__ import annotations

import threading
from datetime import datetime, timezone
from typing import Any

from moto.autoscaling.exceptions import ValidationError
from moto.autoscaling.models import AutoScalingBackend, FakeScheduledAction

from trainlocal.cloud.services.amending import amend

_record = AutoScalingBackend.put_scheduled_update_group_action


def install() -> None:
    """Takes actions when their time has come."""
    amend(AutoScalingBackend, "put_scheduled_update_group_action", _put)


def _put(backend: AutoScalingBackend, **action: Any) -> FakeScheduledAction:
    if action.get("recurrence") or not action.get("start_time"):
        raise ValidationError("Only actions with a start time and without a recurrence are emulated.")
    start: datetime = action["start_time"]
    seconds = (start.replace(tzinfo=timezone.utc) - datetime.now(timezone.utc)).total_seconds()
    if seconds < 0:
        raise ValidationError("Given start time is in the past")
    recorded = _record(backend, **action)
    timer = threading.Timer(seconds, _take, (backend, recorded))
    timer.daemon = True
    timer.start()
    return recorded


def _take(backend: AutoScalingBackend, action: FakeScheduledAction) -> None:
    """Takes an action, unless it or its group is gone or another has its name by now."""
    if backend.scheduled_actions.get(action.scheduled_action_name) is not action:
        return
    group = backend.autoscaling_groups.get(action.auto_scaling_group_name)
    del backend.scheduled_actions[action.scheduled_action_name]
    if group is None:
        return
    for size in ("min_size", "max_size"):
        if getattr(action, size) is not None:
            setattr(group, size, getattr(action, size))
    if action.desired_capacity is not None:
        backend.set_desired_capacity(group.name, action.desired_capacity)
