"""A store in memory whose clock a test sets, and whose deletions can stop half-way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainrun.store import Store, StoredObject, StoreError, StoreKeyMissing


@dataclass
class Held:
    """One object."""

    data: bytes
    modified: float


@dataclass
class MemoryStore(Store):
    """Objects in a dictionary."""

    url: str = "memory"
    now: float = 1e9
    objects: dict[str, Held] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    deletions_left: float = float("inf")
    """How many objects can be deleted before `delete` fails."""

    def put(self, key: str, data: bytes | memoryview, **_: Any) -> None:
        self.objects[key] = Held(bytes(data), self.now)

    def put_new(self, key: str, data: bytes | memoryview, **_: Any) -> bool:
        if key in self.objects:
            return False
        self.put(key, data)
        return True

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get(self, key: str, start: int | None = None, length: int | None = None) -> bytes:
        self.reads.append(key)
        if key not in self.objects:
            raise StoreKeyMissing(f"There is no {key}.")
        begin = start or 0
        return self.objects[key].data[begin : None if length is None else begin + length]

    def _read_block(self, key: str, start: int, into: memoryview, deadline: float | None) -> None:
        into[:] = self.get(key, start, len(into))

    def get_file(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def list(self, prefix: str = "") -> Iterator[StoredObject]:
        for key, held in sorted(self.objects.items()):
            if key.startswith(prefix):
                yield StoredObject(key, len(held.data), held.modified)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            if self.deletions_left <= 0:
                raise StoreError(f"Could not delete {key}.")
            self.deletions_left -= 1
            self.deleted.append(key)
            self.objects.pop(key, None)

    def child(self, prefix: str) -> Store:
        raise NotImplementedError
