"""What kind of nodes this machine allows: found out by trying, and told with its reason."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Literal, get_args

from trainlocal.fleet import cgroups
from trainlocal.fleet.packages import HOST_SYSTEMD, PackagesMissing, image_layer

Tier = Literal["isolated-root", "isolated-user", "plain"]
TIERS: tuple[Tier, ...] = get_args(Tier)
FORCED = "TRAINLOCAL_TIER"

_DESCRIPTIONS: dict[Tier, str] = {
    "isolated-root": "isolated nodes in a user namespace, as root",
    "isolated-user": "isolated nodes in a user namespace, as an ordinary user",
    "plain": "plain processes on loopback, no boot: the user data is run as a script",
}


@dataclass(frozen=True)
class TierChoice:
    """A tier, and in one sentence each what its nodes are and why it is this one."""

    tier: Tier
    description: str
    reason: str
    systemd: bool


class TierUnavailable(ValueError):
    """A tier was asked for that this machine does not allow; the text says why not."""


def choose(tier: Tier | None = None) -> TierChoice:
    """The best tier that this machine allows, or the one asked for by argument or by $TRAINLOCAL_TIER.

    Raises ValueError for a name that is no tier, TierUnavailable when the tier asked for is not to be had here.
    """
    wanted = tier or os.environ.get(FORCED) or None
    if wanted is not None and wanted not in TIERS:
        raise ValueError(f"there is no tier {wanted!r}; the tiers are {', '.join(TIERS)}")
    if wanted == "plain":
        return TierChoice("plain", _DESCRIPTIONS["plain"], "it was asked for", systemd=False)
    own: Tier = "isolated-root" if os.name == "posix" and os.geteuid() == 0 else "isolated-user"
    hindrance = _hindrance()
    if wanted not in (None, own):
        hindrance = f"this process runs as {'root' if own == 'isolated-root' else 'an ordinary user'}"
    if hindrance is None:
        systemd, why = _systemd()
        init = "systemd as init" if systemd else "a small init of ours instead of systemd"
        return TierChoice(own, f"{_DESCRIPTIONS[own]}, with {init}", why, systemd)
    if wanted is not None:
        raise TierUnavailable(f"the tier {wanted!r} is not to be had on this machine: {hindrance}")
    return TierChoice("plain", _DESCRIPTIONS["plain"], f"isolated nodes are not to be had: {hindrance}", systemd=False)


def _hindrance() -> str | None:
    """Why nodes cannot be isolated here, or None when they can."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    try:
        image_layer()
    except PackagesMissing as error:
        return str(error)
    with tempfile.TemporaryDirectory(prefix="trainlocal-") as folder:
        tried = subprocess.run(
            [sys.executable, "-m", "trainlocal.fleet.trial", folder], capture_output=True, text=True, timeout=30, check=False
        )
    if tried.returncode == 0:
        return None
    return (tried.stderr.strip().splitlines() or ["the trial ended without a word"])[-1]


def _systemd() -> tuple[bool, str]:
    """Whether nodes can have systemd, and why (not)."""
    if not HOST_SYSTEMD.exists() and not (image_layer() / HOST_SYSTEMD.relative_to("/")).exists():
        return False, "neither this machine nor the unpacked packages have systemd"
    try:
        cgroups.remove(cgroups.make(f"trainlocal-probe-{os.getpid()}"))
    except OSError as error:
        return False, str(error)
    return True, "namespaces, overlays and a control group are to be had"
