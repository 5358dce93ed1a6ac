"""Calls made by a few threads at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait


def in_threads(calls: Iterable[Callable[[], object]], threads: int) -> None:
    """Make all calls, ``threads`` at a time, and return when none is running any more.

    The first one that fails keeps those that have not begun from beginning, and its exception is raised: what the calls
    write to belongs to the caller again in every case.
    """
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        if any(future.exception() for future in done):
            pool.shutdown(cancel_futures=True)
    for future in futures:
        if not future.cancelled():
            future.result()
