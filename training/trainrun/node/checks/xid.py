"""Xid and SXid messages: what NVIDIA's driver writes to the kernel's log when a GPU or an NVSwitch has an error.

Which of them matter follows the column "Immediate Action" of NVIDIA's catalogue
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html; Ampere and newer). An application's own faults (illegal
accesses, kills) and what the driver has dealt with are told, and nothing more: they say nothing against the node.
"""

from __future__ import annotations

import re
from typing import Literal

from trainrun.node.checks.output import output_of
from trainrun.node.outcome import StepFailed
from trainrun.spec import ClusterSpec
from trainrun.words import counted

Action = Literal["replace", "reboot", "watch", "unknown"]

REPLACE = {
    54: "auxiliary power is not connected",
    64: "a row of memory could not be remapped",  # bucket RESET_GPU; after AWS's own health checks
    79: "the GPU has fallen off the bus",
    110: "security fault, which comes of failing hardware",
    136: "an NVLink could not be trained",
    140: "unrecoverable memory error",
    143: "the GPU could not be initialized",
}
"""The hardware is suspect."""

REBOOT = {
    46: "the GPU stopped processing",
    48: "double-bit memory error",
    62: "the GPU's micro-controller halted",
    74: "NVLink error",
    95: "uncontained memory error",
    109: "a context switch timed out",
    119: "the GPU's system processor does not answer",
    120: "error of the GPU's system processor",
    151: "key rotation error",
    156: "resources were retired, which takes effect by a reset",
    158: "the GPU timed out for good",
}
"""The GPU is of no use until it is reset, which on EC2 a reboot does, and sound hardware is well after it."""

WATCH = frozenset(
    [8, 11, 13, 31, 43, 45, 60, 63, *range(66, 73), *range(75, 79), 80, 92, 94, 121, 137, 141, *range(144, 151), 155, 157]
)
"""An application's fault, an engine that training does not use, corrected, contained, or told by an Xid 154 if it is not."""

RECOVERY_ACTION = 154
"""Its text says what other Xids ask for, in words of NVIDIA's."""
NEEDS_REBOOT = ("Node Reboot Required", "GPU Reset Required", "Drain and Reset")

SHOWN = 5
"""Messages that are told when none is bad: the last ones."""

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(?:, )?(.*)")
_SXID = re.compile(r"SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+), (Fatal|Non-fatal)(?:, )?(.*)")

SAY: dict[Action, str] = {
    "replace": "replace the instance",
    "reboot": "a reboot clears it on sound hardware",
    "watch": "to be watched",
    "unknown": "not known here, see NVIDIA's catalogue",
}


def check_xids(cluster: ClusterSpec) -> str:
    """Look through the kernel's log since the boot.

    Raises:
        StepFailed: there is an Xid after which a GPU cannot be used; with the line.
    """
    if cluster.accelerator != "nvidia":
        return "no Xid messages expected"
    log = kernel_log()
    if not log:
        return "the kernel's log cannot be read (dmesg, journalctl -k): Xid messages were not looked for"
    found = classify(log)
    bad = [f"{line} ({reason}; {SAY[action]})" for action, line, reason in found if action in ("replace", "reboot")]
    if bad:
        raise StepFailed(
            f"The kernel's log shows GPU errors, and a node that is to train has none of this kind: {'; '.join(bad)}. "
            "The node is replaced; if it comes back on the same hardware, tell AWS Support the instance id."
        )
    if not found:
        return "no Xid messages"
    last = "; ".join(f"{line} ({SAY[action]})" for action, line, _ in found[-SHOWN:])
    return f"{counted(len(found), 'Xid message')}, none of them against the node: {last}"


def classify(log: str) -> list[tuple[Action, str, str]]:
    """The Xid and SXid messages of a kernel log: what is to be done, the message, and what it means."""
    found = []
    for line in log.splitlines():
        if match := _XID.search(line):
            found.append((*_of_xid(int(match[2]), match[3]), match[0]))
        elif match := _SXID.search(line):
            fatal = match[3] == "Fatal"
            found.append(("reboot" if fatal else "watch", "an NVSwitch's error", match[0]))
    return [(action, text.strip(), reason) for action, reason, text in found]


def kernel_log() -> str:
    """The kernel's log since the boot; empty when it cannot be read."""
    return output_of("journalctl", "-k", "-b", "--no-pager", "-o", "cat") or output_of("dmesg")


def _of_xid(code: int, text: str) -> tuple[Action, str]:
    if code in REPLACE:
        return "replace", REPLACE[code]
    if code in REBOOT:
        return "reboot", REBOOT[code]
    if code == RECOVERY_ACTION:
        action: Action = "reboot" if any(words in text.rpartition(" to ")[2] for words in NEEDS_REBOOT) else "watch"
        return action, "the action that the driver asks for"
    return ("watch" if code in WATCH else "unknown"), ""
