"""Where an export goes: a folder or a prefix on S3, in which nothing of it appears before it is complete."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainrun.config import ConfigError
from trainrun.directory import DirectoryStore
from trainrun.models.huggingface_files import INDEX
from trainrun.store import Store, StoreError, open_store

CONFIG = "config.json"
"""Written last: a folder that has it is complete."""


@contextmanager
def destination(target: str, *, force: bool) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """A folder to write files into, and what to call with each large one that is complete. At the end they are in the target.

    What fails on the way leaves the target as it was.
    """
    store = open_store(target)
    if not isinstance(store, DirectoryStore):
        with _bucket(store, force=force) as both:
            yield both
        return
    directory = store.directory
    new = not directory.exists()
    work = directory / f".export-{uuid.uuid4().hex[:12]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _require_free(sorted(path.name for path in directory.iterdir()), target, force=force)
        work.mkdir()
    except OSError as error:
        raise ConfigError([f"{target} cannot be written: {error}. Name another folder."]) from None
    try:
        yield work, lambda path: None
        _publish(work, directory)
    except OSError as error:
        raise StoreError(f"The export to {target} failed: {error}. Nothing of it was left there.") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if new and not any(directory.iterdir()):
            directory.rmdir()


@contextmanager
def _bucket(store: Store, *, force: bool) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """On S3: each large file is sent as soon as it is complete, so that the local disk holds one."""
    _require_free([item.key for item in store.list()], store.url, force=force)
    probe = f".export-{uuid.uuid4().hex[:12]}"
    store.put(probe, b"")  # may it be written?
    store.delete([probe])
    written = []

    def send(path: Path) -> None:
        store.put_file(path.name, path)
        written.append(path.name)
        path.unlink()

    with tempfile.TemporaryDirectory(prefix="trainrun-export-") as temporary:
        yield Path(temporary), send
        for path in _config_last(Path(temporary)):
            send(path)
    store.delete([item.key for item in store.list() if _is_stale(item.key, written)])


def _publish(work: Path, directory: Path) -> None:
    written = [path.name for path in _config_last(work)]
    for name in written:
        (work / name).replace(directory / name)
    for path in directory.iterdir():
        if _is_stale(path.name, written):
            path.unlink()


def _config_last(folder: Path) -> list[Path]:
    return sorted(folder.iterdir(), key=lambda path: (path.name == CONFIG, path.name == INDEX, path.name))


def _is_stale(name: str, written: list[str]) -> bool:
    """Whether a file is of an export before this one, which would be taken for a part of it."""
    return name not in written and (name in (INDEX, CONFIG) or (name.startswith("model") and name.endswith(".safetensors")))


def _require_free(names: list[str], target: str, *, force: bool) -> None:
    if names and not force:
        shown = ", ".join(names[:5]) + (" and more" if len(names) > 5 else "")
        raise ConfigError(
            [f"{target} is not empty: it has {shown}. Name another folder, or give --force to replace what is there."]
        )
