"""Programs of the operating system that preparing needs, installed where the image lacks them."""

from __future__ import annotations

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

    def __init__(self, *, run: Run, packages: Packages | None) -> None:
        """Args:
        run: runs commands.
        packages: the package manager; None on a node that may not install anything.
        """
        self.run, self.packages = run, packages

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
