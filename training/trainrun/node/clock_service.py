"""A service that keeps the node's clock: logs and events of several nodes are read side by side, and S3 refuses a clock that
is off by more than 15 minutes. How far it is off is looked at by the check."""

from __future__ import annotations

from trainrun.node.outcome import StepFailed
from trainrun.node.substeps import Done
from trainrun.node.tools import Tools

UNITS = ("chronyd.service", "chrony.service", "systemd-timesyncd.service", "ntpd.service", "ntp.service", "ntpsec.service")
"""chrony is chronyd.service on Amazon Linux and RHEL, chrony.service on Ubuntu."""


def ensure_clock_service(tools: Tools) -> Done:
    """See that one runs; start, or install, chrony if none does. A node without any trains all the same, and says so."""
    try:
        if running := _running(tools):
            return Done(f"{running} keeps it")
        remark = tools.want("chronyd")
        there = tools.run("systemctl", "list-unit-files", "--no-legend", "--plain", *UNITS[:2]).split()
        unit = next((unit for unit in UNITS if unit in there), UNITS[0])
        tools.run("systemctl", "enable", "--now", unit)
        return Done(f"{unit} started{remark}", changed=True)
    except StepFailed as failure:
        return Done(f"nothing keeps it: {failure}")


def _running(tools: Tools) -> str:
    listing = tools.run("systemctl", "list-units", "--no-legend", "--plain", "--state=active", *UNITS)
    return next((line.split()[0] for line in listing.splitlines() if line.strip()), "")
