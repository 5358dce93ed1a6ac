"""Notifications to web addresses, which moto would really send: here they go nowhere, and publishing succeeds as on AWS."""

from __future__ import annotations

from typing import Any

from moto.sns.models import Subscription

from trainlocal.cloud.services.amending import amend

_publish = Subscription.publish


def install() -> None:
    """Keeps notifications inside the account."""
    amend(Subscription, "publish", _publish_inside)


def _publish_inside(subscription: Subscription, *arguments: Any, **options: Any) -> None:
    if subscription.protocol not in ("http", "https"):
        _publish(subscription, *arguments, **options)
