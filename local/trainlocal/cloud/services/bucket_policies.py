"""Bucket policies with conditions.

moto denies whatever a Deny statement names, whether its condition holds or not, so the usual "TLS only" statement answers
every request over plain loopback HTTP with 403. The emulated account counts as reached over TLS by its own role: a statement
with a condition plays no part. One without conditions (deny everyone, always) is enforced as moto does it.
"""

from __future__ import annotations

import json
from typing import Any

from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.models import FakeBucket

from trainlocal.cloud.services.amending import amend


def install() -> None:
    """Makes buckets judge requests by their unconditional statements only."""
    amend(FakeBucket, "get_permission", _permission)


def _permission(bucket: FakeBucket, action: str, resource: str) -> Any:
    if bucket.policy is None:
        return PermissionResult.NEUTRAL
    policy = json.loads(bucket.policy)
    statements = policy["Statement"] if isinstance(policy["Statement"], list) else [policy["Statement"]]
    unconditional = [statement for statement in statements if "Condition" not in statement]
    return IAMPolicy(json.dumps({**policy, "Statement": unconditional})).is_action_permitted(action, resource)
