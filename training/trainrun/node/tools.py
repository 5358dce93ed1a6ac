"""Programs of the operating system that preparing needs, installed where the image lacks them."""

from __future__ import annotations

from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.node.packages import Apt, Packages

PACKAGES = {
    "chronyd": ("chrony", "chrony"),
    "mdadm": ("mdadm", "mdadm"),
    "mkfs.xfs": ("xfsprogs", "xfsprogs"),
    "mount.efs": ("", "amazon-efs-utils"),
    "mount.nfs4": ("nfs-common", "nfs-utils"),
    "numactl": ("numactl", "numactl"),
}
"""The package of a program, in apt and in dnf; "" where the distribution has none."""


class Tools:
    """What programs there are, and where the missing ones come from."""

    def __init__(self, *, run: Run, packages: Packages | None, notes: Path | None = None) -> None:
        """Args:
        run: runs commands.
        packages: the package manager; None on a node that may not install anything.
        notes: folder for notes of what could not be installed, so that it is not tried at each start of the agent.
        """
        self.run, self.packages, self._notes = run, packages, notes

    def has(self, program: str) -> bool:
        """Whether a program is on the search path, or where only root has it."""
        try:
            self.run("sh", "-c", f'PATH="$PATH:/sbin:/usr/sbin"; command -v {program}')
        except StepFailed:
            return False
        return True

    def need(self, program: str) -> str:
        """Have a program. Returns a remark about what was installed for it, "" for nothing.

        Raises:
            StepFailed: the image lacks it and it cannot be installed.
        """
        if self.has(program):
            return ""
        if self.packages is None:
            raise StepFailed(f"The image has no {program}.")
        of_apt, of_dnf = PACKAGES[program]
        name = of_apt if isinstance(self.packages, Apt) else of_dnf
        if not name:
            raise StepFailed(f"The image has no {program}, and {self.packages.system.name} has no package of it.")
        self.packages.install(name)
        return f", {name} installed"

    def want(self, program: str) -> str:
        """As `need`, for what a node can do without: one attempt is enough, since it may take seconds to fail.

        Raises:
            StepFailed: the image lacks it, and it cannot, or could not, be installed.
        """
        note = self._notes / f"no-{program}" if self._notes else None
        if note and note.exists() and not self.has(program):
            raise StepFailed(note.read_text(encoding="utf-8"))
        try:
            return self.need(program)
        except StepFailed as failure:
            if note:
                note.write_text(str(failure), encoding="utf-8")
            raise
