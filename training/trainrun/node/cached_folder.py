"""Folders that take long to make: made once, and kept in the bucket for other nodes and later runs.

What is in such a folder holds its own path, so it is of use at that path only, which is a part of its name in the bucket.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainrun.node.commands import Run
from trainrun.node.outcome import StepFailed
from trainrun.store import Store, StoreError, StoreKeyMissing

COMPLETE = ".traincluster-complete"
"""A file that is in a folder once all else is: whatever was interrupted lacks it, and is made anew."""
TAR_SECONDS = 1800.0

log = logging.getLogger(__name__)


def key_of(*facts: object) -> str:
    """A name for what depends on these facts."""
    return hashlib.sha256(json.dumps([str(fact) for fact in facts]).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class CachedFolder:
    """One such folder."""

    folder: Path
    store: Store
    """Where the archives of all such folders are."""
    run: Run

    @property
    def key(self) -> str:
        """Says which archive is the folder's, and its digest."""
        return f"{self.folder.name}.json"

    def obtain(self, make: Callable[[], str], *, verify: Callable[[], None]) -> str:
        """Have the folder. Returns where it came from, with seconds and remarks.

        Args:
            make: makes the folder's content, and says how. What it leaves behind when it fails is removed.
            verify: raises StepFailed when the folder does not do here.

        Raises:
            StepFailed: as ``make`` and ``verify`` do.
        """
        if (self.folder / COMPLETE).exists():
            return f"was there, {self.folder}"
        self._remove()
        began = time.monotonic()
        fetched, remark = self._fetch(verify)
        if fetched:
            return f"fetched from {self.store.url} in {time.monotonic() - began:.1f} s, {self.folder}"
        began = time.monotonic()
        try:
            how = make()
            verify()
        except BaseException:
            self._remove()
            raise
        (self.folder / COMPLETE).touch()
        return f"made in {time.monotonic() - began:.1f} s ({how}), {self.folder}{remark}{self._send(replace=bool(remark))}"

    def _fetch(self, verify: Callable[[], None]) -> tuple[bool, str]:
        """Unpack what the bucket has. Returns whether it did, and a remark when something was wrong."""
        archive = self._archive
        try:
            told = json.loads(self.store.get(self.key))
            self.store.get_file(told["archive"], archive)
            if (found := _digest(archive)) != told["sha256"]:
                raise StepFailed(f"its sha256 is {found}, not {told['sha256']}")
            self._unpack(archive)
            verify()
        except StoreKeyMissing:
            self._remove()
            return False, ""
        except (StoreError, StepFailed, OSError, ValueError, KeyError, TypeError) as error:
            self._remove()
            log.warning("The archive in %s is of no use: %s", self.store.url, error)
            return False, f"; the archive in {self.store.url} was of no use: {error}"
        finally:
            archive.unlink(missing_ok=True)
        (self.folder / COMPLETE).touch()
        return True, ""

    def _unpack(self, archive: Path) -> None:
        self.folder.mkdir(parents=True)
        self.run("tar", "-xf", str(archive), "-C", str(self.folder), timeout=TAR_SECONDS)

    def _send(self, *, replace: bool) -> str:
        """Keep the folder. Of two nodes that do so at once the first wins; the other's archive is removed again.

        Args:
            replace: whether what is kept is of no use.
        """
        began = time.monotonic()
        archive = self._archive
        try:
            if not replace and self._is_kept():
                return ""  # another node has been faster
            self.run("tar", "-cf", str(archive), "-C", str(self.folder), f"--exclude=./{COMPLETE}", ".", timeout=TAR_SECONDS)
            digest = _digest(archive)
            name = f"{self.folder.name}/{digest}.tar"
            self.store.put_file(name, archive)
            pointer = json.dumps({"archive": name, "sha256": digest}).encode()
            if replace:
                self.store.put(self.key, pointer)
            elif not self.store.put_new(self.key, pointer):
                kept = json.loads(self.store.get(self.key))["archive"]
                self.store.delete([name] if kept != name else [])
                return ""
        except (StoreError, StepFailed, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not kept in %s: %s", self.folder, self.store.url, error)
            return f"; not kept in {self.store.url}: {error}"
        finally:
            archive.unlink(missing_ok=True)
        return f"; kept in {self.store.url} in {time.monotonic() - began:.1f} s"

    def _is_kept(self) -> bool:
        try:
            self.store.get(self.key)
        except StoreKeyMissing:
            return False
        return True

    @property
    def _archive(self) -> Path:
        """Beside the folder, where there is room for it."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        return self.folder.with_name(f"{self.folder.name}.tar")

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
