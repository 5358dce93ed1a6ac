"""Keep the node's software as the image brought it.

A first boot on Ubuntu upgrades packages by itself: it holds dpkg's lock while others install, and it may put a kernel or a driver
in place that the Lustre client and the running modules do not match. A training node upgrades by another image instead.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.commands import run as run_command
from trainrun.node.outcome import StepFailed
from trainrun.node.packages import LOCK_SECONDS, when_unlocked
from trainrun.node.substeps import Done

_APT_SETTINGS = f"""\
APT::Periodic::Enable "0";
APT::Periodic::Update-Package-Lists "0";
APT::Periodic::Unattended-Upgrade "0";
DPkg::Lock::Timeout "{LOCK_SECONDS}";
"""
_NEEDRESTART_SETTINGS = "$nrconf{restart} = 'l';\n"  # list what would be restarted, restart nothing
_APT_UNITS = ("apt-daily.service", "apt-daily-upgrade.service", "unattended-upgrades.service")
_APT_TIMERS = ("apt-daily.timer", "apt-daily-upgrade.timer")
_DNF_TIMERS = ("dnf-automatic.timer", "dnf-automatic-install.timer")
_HELD = re.compile(r"linux-(image|headers|modules|aws)\b.*|lustre-client-.*|(lib)?nvidia-.*")
_EXCLUDED = "kernel* kmod-nvidia* nvidia-*"


def stop_upgrades(*, root: Path = Path("/"), run: Run = run_command, sleep: Callable[[float], None] = time.sleep) -> Done:
    """Turn automatic upgrades off and hold kernel, driver and Lustre client; may run again. Returns what was done.

    An image that does not let itself be told so trains all the same; what is returned then says why.
    """
    steps = {"apt": _stop_apt, "dnf": _stop_dnf}
    for name, step in steps.items():
        if (root / "usr/bin" / name).exists():
            try:
                return step(root, run, sleep)
            except (StepFailed, OSError) as fault:
                return Done(f"upgrades may go on: {fault}", changed=True)
    return Done("no package manager to hold")


def _stop_apt(root: Path, run: Run, sleep: Callable[[float], None]) -> Done:
    changed = _write(root / "etc/apt/apt.conf.d/99-traincluster", _APT_SETTINGS)
    changed |= _write(root / "etc/needrestart/conf.d/traincluster.conf", _NEEDRESTART_SETTINGS)
    changed |= _mask(root, run, timers=_APT_TIMERS, services=_APT_UNITS)
    if not (root / "var/lib/dpkg/status").exists():
        return Done("upgrades off, no package is recorded as installed", changed)
    listing = run("dpkg-query", "--show", "--showformat", "${db:Status-Abbrev} ${Package}\n")
    held = sorted(
        name for state, name in (line.split() for line in listing.splitlines()) if state == "ii" and _HELD.fullmatch(name)
    )
    if set(held) - set(run("apt-mark", "showhold").split()):
        when_unlocked(lambda: run("apt-mark", "hold", *held), sleep)
        changed = True
    return Done(f"upgrades off, {len(held)} packages of kernel and driver held", changed)


def _stop_dnf(root: Path, run: Run, sleep: Callable[[float], None]) -> Done:
    changed = _mask(root, run, timers=_DNF_TIMERS, services=())
    settings = root / "etc/dnf/dnf.conf"
    text = settings.read_text(encoding="utf-8") if settings.exists() else "[main]\n"
    if re.search(r"^exclude(pkgs)?\s*=", text, flags=re.MULTILINE):
        return Done("upgrades off, packages held as /etc/dnf/dnf.conf has it", changed)
    _write(settings, f"{text.rstrip()}\nexcludepkgs={_EXCLUDED}\n")
    return Done("upgrades off, kernel and driver held", changed=True)


def _mask(root: Path, run: Run, *, timers: tuple[str, ...], services: tuple[str, ...]) -> bool:
    """Let nothing start an upgrade any more. One that runs is left to its end: cut off, it leaves packages half installed.

    Returns:
        Whether anything was masked that was not before.
    """
    if not (root / "run/systemd/system").exists():
        return False
    units = root / "etc/systemd/system"
    masked = {
        unit for unit in (*timers, *services) if (units / unit).is_symlink() and (units / unit).readlink() == Path(os.devnull)
    }
    for units_of_kind, now in ((timers, ("--now",)), (services, ())):
        if left := [unit for unit in units_of_kind if unit not in masked]:
            run("systemctl", "mask", *now, *left)
    return bool({*timers, *services} - masked)


def _write(file: Path, text: str) -> bool:
    """Have a file with this text. Returns whether it is new."""
    if file.exists() and file.read_text(encoding="utf-8") == text:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return True
