"""What failed by something that may pass is tried again, but not without end."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError

from trainrun.node import patience
from trainrun.node.outcome import StepFailed
from trainrun.node.patience import patiently
from trainrun.store import StoreError

THROTTLED = ClientError({"Error": {"Code": "RequestLimitExceeded", "Message": "slower"}}, "DescribeInstances")


@pytest.fixture
def act(monkeypatch):
    """act(*errors): fails by each of them in turn, then comes to an end; the clock goes by the pauses."""
    now = [0.0]
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])

    def of(*errors):
        left = list(errors)

        def action():
            if left:
                raise left.pop(0)
            return "done"

        action.left = left
        return action

    return of


def test_what_passes_is_waited_for(act):
    assert patiently(act(THROTTLED, ValueError("no reservation"))) == "done"


def test_what_does_not_pass_is_a_fault_of_the_node(act):
    with pytest.raises(StepFailed, match=r"failed for 300 s, the last time by ClientError: .*RequestLimitExceeded"):
        patiently(act(*40 * [THROTTLED]))


@pytest.mark.parametrize("error", [StepFailed("no disk"), StoreError("no way to S3")])
def test_what_is_understood_is_not_tried_again(error, act):
    action = act(error, THROTTLED)
    with pytest.raises(type(error)):
        patiently(action)
    assert action.left == [THROTTLED]
