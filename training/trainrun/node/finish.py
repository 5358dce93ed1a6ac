"""End the run: a durable result, and then the group's capacity."""

from __future__ import annotations

import json
import logging
import time

from trainrun.node.group import Group
from trainrun.node.metric_files import MetricFiles
from trainrun.node.outcome import Outcome
from trainrun.spec import ShutdownSpec
from trainrun.store import Store, StoreError, StoreKeyMissing

KEY = "result.json"
STORE_SECONDS = 600.0

log = logging.getLogger(__name__)


class Result:
    """The run's result, as far as it belongs to this start of the run."""

    def __init__(self, *, store: Store, since: float) -> None:
        """Args:
        store: the run's folder.
        since: epoch; a result from before it is that of an earlier start of the same run.
        """
        self._store = store
        self._since = since

    def ended(self) -> str:
        """Why the run is over although this node did not end it, or "".

        Raises:
            StoreError: the store did not answer.
        """
        try:
            result = json.loads(self._store.get(KEY))
        except StoreKeyMissing:
            return ""
        if result["time"] < self._since:
            return ""
        return f"The run has {result['state']}, says {result['node']}: {result['reason']}"

    def write(self, outcome: Outcome, *, node: str, last_step: tuple[int, int] | None) -> None:
        """Put the result down.

        Raises:
            StoreError: the store did not take it.
        """
        step, steps = last_step or (0, 0)
        result = {
            "state": outcome.state,
            "step": step,
            "steps": steps,
            "time": time.time(),  # whole: rounded, it could lie before the start of an agent that has just started
            "reason": outcome.reason,
            "node": node,
        }
        self._store.put(KEY, json.dumps(result).encode())


def finish(
    outcome: Outcome, *, node: str, shutdown: ShutdownSpec, result: Result, metric_files: MetricFiles, group: Group
) -> str:
    """Send the last metrics, put the result down, and let the group go where the document says so. Returns what was done.

    The capacity changes only once the result is durable: nobody could tell the end from a loss otherwise.

    Raises:
        StoreError: the store did not take the result for 10 minutes.
        botocore.exceptions.BotoCoreError, ClientError: the group could not be scaled.
    """
    deadline = time.monotonic() + STORE_SECONDS
    while True:
        try:
            metric_files.send()
            result.write(outcome, node=node, last_step=metric_files.last_step())
            break
        except StoreError:
            if time.monotonic() > deadline:
                raise
            log.exception("The result is not durable yet; trying again.")
            time.sleep(5.0)
    then = {"succeeded": shutdown.on_success, "failed": shutdown.on_failure, "stopped": "scale_to_zero"}[outcome.state]
    if then == "scale_to_zero":
        group.scale_to_zero()
        return f"{outcome.state}; the group is scaled to zero"
    return f"{outcome.state}; the group is kept"
