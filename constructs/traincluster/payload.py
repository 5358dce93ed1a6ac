"""The payload: the code that runs on a node, packed so that equal input gives equal bytes."""

from __future__ import annotations

import hashlib
import io
import lzma
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import trainrun.spec

MOST_SOURCE_BYTES = 64 * 1024 * 1024
"""The most that a payload's files may hold together. What is larger is data, and belongs into a bucket."""

_LEFT_OUT_FOLDERS = frozenset({"__pycache__", "node_modules", "cdk.out"})
_LEFT_OUT_SUFFIXES = (".pyc", ".pyo", ".egg-info")


@dataclass(frozen=True)
class Payload:
    """A .tar.xz archive with trainrun/ and, where a job brings code of its own, project/."""

    archive: bytes

    @cached_property
    def sha256(self) -> str:
        """Digest of the archive, which a node checks before it unpacks anything."""
        return hashlib.sha256(self.archive).hexdigest()


def pack(source: Path | None, *, package: Path | None = None) -> Payload:
    """Pack the node's code.

    Members are sorted and carry no times, owners or other traces of the machine, so that two synths of the same sources
    give the same archive. Hidden files and caches stay out.

    Args:
        source: folder of the user's project, or None when the job runs trainrun's own loop.
        package: folder of the trainrun package; None means the one that is imported here.

    Raises:
        ValueError: the source is not a folder, is too large, or holds a link to a folder or out of it.
    """
    package = package or _package()
    files = [(f"trainrun/{name}", path) for name, path in _files(package, root=package)]
    if source is not None:
        if not source.is_dir():
            raise ValueError(f"source is {str(source)!r}, which is not a folder. Give the folder that holds the entry point.")
        files += [(f"project/{name}", path) for name, path in _files(source, root=source)]
    _check_total(files)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in sorted(files):
            content = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(member, io.BytesIO(content))
    # Each synth packs: trainrun at preset 3 takes a fifth of the time of preset 9 and a twelfth more bytes.
    return Payload(lzma.compress(buffer.getvalue(), preset=3))


def packed_files(source: Path | None = None) -> frozenset[str]:
    """Names of the files that are packed, as they lie on the node's module path: those of trainrun, or of a user's project."""
    if source is None:
        return frozenset(f"trainrun/{name}" for name, _ in _files(_package(), root=_package()))
    return frozenset(name for name, _ in _files(source, root=source))


def _package() -> Path:
    """The folder of the trainrun that is imported here."""
    return Path(trainrun.spec.__file__).parent


def _files(folder: Path, *, root: Path) -> Iterator[tuple[str, Path]]:
    """Every file to pack below a folder, with its name relative to it."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name.endswith(_LEFT_OUT_SUFFIXES):
            continue
        if path.is_symlink() and (path.is_dir() or root.resolve() not in path.resolve().parents):
            raise ValueError(f"{path} is a link to {path.readlink()}, and only links to files of the source are packed. Copy it.")
        if path.is_dir():
            if path.name not in _LEFT_OUT_FOLDERS:
                yield from ((f"{path.name}/{name}", file) for name, file in _files(path, root=root))
        elif path.is_file():
            yield path.name, path


def _check_total(files: list[tuple[str, Path]]) -> None:
    sizes = {name: path.stat().st_size for name, path in files}
    total = sum(sizes.values())
    if total > MOST_SOURCE_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"The job's source holds {total:,} bytes; at most {MOST_SOURCE_BYTES:,} are packed. The largest file is {largest} "
            f"({sizes[largest]:,} bytes). Put data into the dataset bucket and read it from there."
        )
