"""Upgrades of a node are off, and its kernel and driver held."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.node.outcome import StepFailed
from trainrun.node.substeps import Done
from trainrun.node.upgrades import LOCK_SECONDS, stop_upgrades

INSTALLED = """\
ii  bash
ii  linux-image-6.17.0-1020-aws
ii  linux-aws
rc  linux-image-6.14.0-1018-aws
ii  libnvidia-compute-595
ii  nvidia-driver-595-open
ii  lustre-client-modules-6.17.0-1020-aws
ii  linuxinfo
"""
HELD = (
    "libnvidia-compute-595",
    "linux-aws",
    "linux-image-6.17.0-1020-aws",
    "lustre-client-modules-6.17.0-1020-aws",
    "nvidia-driver-595-open",
)


class Commands:
    """Records what is run; `apt-mark` finds dpkg locked a number of times."""

    def __init__(self, locked: int = 0, *, root: Path = Path("/nonexistent")) -> None:
        self.ran: list[tuple[str, ...]] = []
        self.locked = locked
        self.root = root
        self.held: set[str] = set()

    def __call__(self, *command: str) -> str:
        self.ran.append(command)
        if command[:2] == ("apt-mark", "showhold"):
            return "\n".join(sorted(self.held))
        if command[0] == "apt-mark" and self.locked:
            self.locked -= 1
            raise StepFailed(
                "apt-mark hold failed with status 100: dpkg: error: dpkg frontend lock was locked by another process"
            )
        if command[0] == "apt-mark":
            self.held.update(command[2:])
        if command[:2] == ("systemctl", "mask") and self.root.is_dir():
            for unit in command[2:]:
                if not unit.startswith("--"):
                    (self.root / "etc/systemd/system").mkdir(parents=True, exist_ok=True)
                    (self.root / "etc/systemd/system" / unit).symlink_to("/dev/null")
        return INSTALLED if command[0] == "dpkg-query" else ""


@pytest.fixture
def ubuntu(tmp_path: Path) -> Path:
    for name in ("usr/bin/apt", "var/lib/dpkg/status"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "run/systemd/system").mkdir(parents=True)
    return tmp_path


def test_boot_02_nothing_upgrades_by_itself_and_every_apt_waits_for_the_lock(ubuntu):
    commands = Commands()
    done = stop_upgrades(root=ubuntu, run=commands)
    assert done == Done("upgrades off, 5 packages of kernel and driver held", changed=True)
    settings = (ubuntu / "etc/apt/apt.conf.d/99-traincluster").read_text()
    assert 'APT::Periodic::Unattended-Upgrade "0";' in settings
    assert f'DPkg::Lock::Timeout "{LOCK_SECONDS}";' in settings
    assert "'l'" in (ubuntu / "etc/needrestart/conf.d/traincluster.conf").read_text()
    assert ("systemctl", "mask", "--now", "apt-daily.timer", "apt-daily-upgrade.timer") in commands.ran
    masked = [name for command in commands.ran if command[:2] == ("systemctl", "mask") for name in command[2:]]
    assert "unattended-upgrades.service" in masked
    assert commands.ran[-1] == ("apt-mark", "hold", *HELD)


def test_boot_02_a_lock_that_is_held_is_waited_for(ubuntu):
    waited: list[float] = []
    commands = Commands(locked=12)
    assert "5 packages" in stop_upgrades(root=ubuntu, run=commands, sleep=waited.append).detail
    assert sum(waited) == 60


def test_a_lock_that_never_opens_ends_the_wait_and_is_told(ubuntu):
    waited: list[float] = []
    told = stop_upgrades(root=ubuntu, run=Commands(locked=10_000), sleep=waited.append).detail
    assert told.startswith("upgrades may go on: apt-mark hold failed")
    assert sum(waited) == LOCK_SECONDS


def test_a_second_time_nothing_is_changed(ubuntu):
    commands = Commands(root=ubuntu)
    assert stop_upgrades(root=ubuntu, run=commands).changed
    before = len(commands.ran)
    again = stop_upgrades(root=ubuntu, run=commands)
    assert again == Done("upgrades off, 5 packages of kernel and driver held", changed=False)
    assert [command[:2] for command in commands.ran[before:]] == [("dpkg-query", "--show"), ("apt-mark", "showhold")]


def test_what_was_left_undone_is_done_the_next_time(ubuntu):
    commands = Commands(root=ubuntu, locked=10_000)
    assert "upgrades may go on" in stop_upgrades(root=ubuntu, run=commands, sleep=lambda _: None).detail
    commands.locked = 0
    assert stop_upgrades(root=ubuntu, run=commands).changed
    assert commands.held == set(HELD)


def test_amazon_linux_and_red_hat_hold_the_kernel_too(tmp_path):
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/dnf").touch()
    (tmp_path / "etc/dnf").mkdir(parents=True)
    (tmp_path / "etc/dnf/dnf.conf").write_text("[main]\ngpgcheck=1\n")
    commands = Commands()
    assert stop_upgrades(root=tmp_path, run=commands) == Done("upgrades off, kernel and driver held", changed=True)
    text = (tmp_path / "etc/dnf/dnf.conf").read_text()
    assert text.startswith("[main]\ngpgcheck=1\nexcludepkgs=kernel* ")
    again = stop_upgrades(root=tmp_path, run=commands)
    assert again.detail.endswith("as /etc/dnf/dnf.conf has it") and not again.changed
    assert (tmp_path / "etc/dnf/dnf.conf").read_text() == text
    assert commands.ran == []  # no systemd runs here


def test_an_image_with_neither_is_left_alone(tmp_path):
    assert stop_upgrades(root=tmp_path, run=Commands()) == Done("no package manager to hold")
    assert list(tmp_path.iterdir()) == []
