"""What is mounted now, and what /etc/fstab mounts after a reboot."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "# Mounts of traincluster, written by the node agent", "# End of the mounts of traincluster"


class Mounted:
    """The mount table and the part of /etc/fstab that is ours."""

    def __init__(self, *, table: Path = Path("/proc/self/mounts"), fstab: Path = Path("/etc/fstab")) -> None:
        self._table, self._fstab = table, fstab

    def at(self, path: str) -> str:
        """What is mounted at a path: the source, or "" for nothing."""
        source = ""
        for line in self._table.read_text(encoding="utf-8").splitlines():
            fields = line.split(" ")
            if len(fields) > 2 and fields[1] == path and fields[2] != "autofs":
                source = fields[0]  # the last one lies on top
        return source

    def keep(self, source: str, path: str, kind: str, options: str) -> bool:
        """Have something mounted after each boot. The entry replaces one of ours for the same path.

        Returns:
            Whether the entry is new.
        """
        try:
            lines = self._fstab.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            lines = []
        before, ours, after = _split(lines)
        kept = [line for line in ours if line.split()[1] != path]
        entry = f"{source} {path} {kind} {options} 0 0"
        if entry in ours and len(kept) == len(ours) - 1:
            return False
        text = "\n".join([*before, BEGIN, *kept, entry, END, *after]) + "\n"
        new = self._fstab.with_name(f"{self._fstab.name}.traincluster")
        new.write_text(text, encoding="utf-8")
        new.chmod(0o644)
        new.replace(self._fstab)  # a crash leaves the old one or the new one
        return True


def _split(lines: list[str]) -> tuple[list[str], list[str], list[str]]:
    """The lines before, in and after our part."""
    if BEGIN not in lines or END not in lines:
        return lines, [], []
    first, last = lines.index(BEGIN), lines.index(END)
    return lines[:first], lines[first + 1 : last], lines[last + 1 :]
