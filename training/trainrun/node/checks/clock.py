"""The clock: signed requests, certificates and the times of events need one that is right."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime

from trainrun.node.checks.output import output_of
from trainrun.node.outcome import StepFailed

BEWARE_SECONDS = 1.0
"""Amazon Time Sync keeps a clock within a millisecond; a second shows that nothing keeps this one."""
MOST_SECONDS = 60.0
"""Amazon S3 refuses requests whose time is more than 15 minutes from its own (RequestTimeTooSkewed). A clock that is a minute off
right after the boot is on its way there."""
REQUEST_SECONDS = 10.0


def check_clock(endpoint: str) -> str:
    """Compare the clock with chrony's sources, or else with the time that S3 answers with.

    Args:
        endpoint: URL of S3; "" when there is none to ask.

    Raises:
        StepFailed: it is off by more than a minute.
    """
    offset, source = chrony_offset(), "chrony"
    if offset is None:
        offset, source = date_offset(endpoint) if endpoint else None, f"the time that {endpoint} tells, to a second"
    if offset is None:
        return "the clock was not compared: chrony is not running or not synchronized, and no S3 answers"
    if abs(offset) > MOST_SECONDS:
        raise StepFailed(
            f"The clock is {offset:+.1f} s off ({source}); at most {MOST_SECONDS:g} s are allowed, and beyond 15 minutes S3 "
            "refuses every request. Have chrony run with Amazon Time Sync (server 169.254.169.123), as AWS's images do."
        )
    beware = " Beware: nothing seems to keep it; have chrony run." if abs(offset) > BEWARE_SECONDS + (source != "chrony") else ""
    return f"the clock is {offset:+.6f} s off ({source}).{beware}"


def chrony_offset() -> float | None:
    """By how much the clock is ahead, as chrony says; None when it does not run or has found no source yet."""
    fields = output_of("chronyc", "-c", "tracking", timeout=10).strip().split(",")
    if len(fields) < 14 or fields[-1] == "Not synchronised" or fields[2] == "0":
        return None
    try:
        return float(fields[4])  # "System time": positive is ahead of NTP time (chronyc(1))
    except ValueError:
        return None


def date_offset(endpoint: str) -> float | None:
    """By how much the clock is ahead of a server's answer, whatever that is otherwise; None when there is none."""
    request = urllib.request.Request(endpoint, method="HEAD")
    started = time.time()
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as refusal:  # as S3 does with a request that nobody signed
        date = refusal.headers["Date"]
    except (OSError, ValueError):
        return None
    if not date:
        return None
    # The header has whole seconds: half of one is taken for the rest, and half of the way there and back for the way.
    return (started + time.time()) / 2 - (parsedate_to_datetime(date).timestamp() + 0.5)
