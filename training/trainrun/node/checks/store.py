"""The run's folder, in which everything ends that is to outlive a node."""

from __future__ import annotations

import time
from collections.abc import Callable

from trainrun.node.outcome import StepFailed
from trainrun.store import Store, StoreError

STORE_SECONDS = 60.0
"""Credentials and endpoints of a fresh instance may need some seconds to work."""


def check_store(store: Store, *, key: str, send: Callable[[], None], timeout: float = STORE_SECONDS) -> str:
    """Write an object to the run's folder and read it back.

    Args:
        store: the run's folder.
        key: of the object.
        send: writes it.
        timeout: how long it is tried, in seconds.

    Raises:
        StepFailed: not possible within ``timeout``.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            send()
            store.get(key)
        except StoreError as error:
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"{store.url} cannot be written and read: {error} "
                    "Do the bucket and its key exist, does the instance's role allow it, is there a way to S3?"
                ) from None
            time.sleep(2.0)
        else:
            return f"{store.url} can be written"
