"""Datasets: written the same everywhere, checked when read, fetched once per node."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainrun.config import ConfigError
from trainrun.data import cache
from trainrun.data.dataset import HELD_OUT, TRAIN, open_dataset
from trainrun.data.write import decode, encode, find_documents, write_dataset
from trainrun.store import StoreError, open_store


def write(corpus: Path, url: str, **options: Any) -> Any:
    return write_dataset(find_documents([str(corpus)]), url, **options)


def test_every_byte_of_every_file_is_there_once(corpus: Path, dataset: str) -> None:
    opened = open_dataset(dataset)
    texts = []
    for name in (TRAIN, HELD_OUT):
        tokens, split = opened.tokens(name), opened.split(name)
        assert len(tokens) == split.tokens == split.bytes + split.documents
        texts += decode(tokens.tolist()).split("\f")[:-1]
    assert sorted(texts) == sorted(path.read_text() for path in corpus.iterdir())
    held_out = opened.split(HELD_OUT).bytes / sum(path.stat().st_size for path in corpus.iterdir())
    assert 0.2 <= held_out < 0.31


def test_any_bytes_survive() -> None:
    assert decode(encode(b"caf\xc3\xa9\x00\n").tolist()) == "café\x00\n"
    assert decode(encode(b"\xff").tolist()) == "\N{REPLACEMENT CHARACTER}"


def test_the_same_files_give_the_same_bytes_wherever_they_lie(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "elsewhere")
    write(corpus, str(tmp_path / "a"))
    write(tmp_path / "elsewhere", str(tmp_path / "b"))
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b
    assert len(a) == 3


def test_what_is_there_already_is_the_same_or_an_error(corpus: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "d")
    assert write(corpus, url) == write(corpus, url)
    with pytest.raises(ConfigError, match="holds another dataset"):
        write(corpus, url, held_out=0.5)


def test_patterns_pick_files(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "deep/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [d.name for d in find_documents([str(tmp_path)], pattern="*.py")] == ["0/a.py"]
    assert [d.name for d in find_documents([str(tmp_path)], pattern="**/*.py")] == ["0/a.py", "0/deep/c.py"]
    assert [d.name for d in find_documents([str(tmp_path / "b.txt"), str(tmp_path / "deep")])] == ["0/b.txt", "1/c.py"]
    with pytest.raises(ConfigError, match="No text was found"):
        find_documents([str(tmp_path)], pattern="*.md")
    with pytest.raises(ConfigError, match="does not exist"):
        find_documents([str(tmp_path / "nowhere")])


def test_splits_that_leave_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "only").write_text("text")
    with pytest.raises(ConfigError, match="leaves none to train on"):
        write(tmp_path, str(tmp_path / "d"))
    assert list(write(tmp_path, str(tmp_path / "d"), held_out=0).splits) == [TRAIN]
    with pytest.raises(ConfigError, match="has no split 'held-out'"):
        open_dataset(str(tmp_path / "d")).split(HELD_OUT)
    with pytest.raises(ConfigError, match=r"Allowed: 0 \(none\) to less than 1"):
        write(tmp_path, str(tmp_path / "e"), held_out=1.5)


def test_what_is_no_dataset_is_refused(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(ConfigError, match="There is no dataset at"):
        open_dataset(str(tmp_path))
    with pytest.raises(ConfigError, match="No data is named"):
        open_dataset("")
    shutil.copytree(dataset, tmp_path / "d")
    description = json.loads((tmp_path / "d/dataset.json").read_text())
    (tmp_path / "d/dataset.json").write_text(json.dumps({**description, "vocabulary": 300}))
    with pytest.raises(ConfigError, match="was changed"):
        open_dataset(str(tmp_path / "d"))
    (tmp_path / "d/dataset.json").write_text(json.dumps({**description, "schema": 2}))
    with pytest.raises(ConfigError, match="has schema 2"):
        open_dataset(str(tmp_path / "d"))


def test_a_file_of_another_length_is_refused(tmp_path: Path, dataset: str) -> None:
    shutil.copytree(dataset, tmp_path / "d")
    opened = open_dataset(str(tmp_path / "d"))
    path = tmp_path / "d" / opened.split(TRAIN).file
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match="its description says"):
        opened.tokens(TRAIN)


def test_from_s3_a_file_comes_to_the_node_once(
    corpus: Path, bucket: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path / "cache"))
    written = write(corpus, f"s3://{bucket}/text")
    s3.requests.clear()
    found: list[bytes] = []
    readers = [
        threading.Thread(target=lambda: found.append(open_dataset(f"s3://{bucket}/text").tokens(TRAIN).tobytes()))
        for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert sum(request.startswith(f"GET /{bucket}/text/{written.splits[TRAIN].file}") for request in s3.requests) == 1


def test_a_damaged_download_is_refused_and_not_kept(
    corpus: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path / "cache"))
    file = write(corpus, f"s3://{bucket}/text").splits[TRAIN].file
    store = open_store(f"s3://{bucket}/text")
    good = store.get(file)
    store.put(file, good[:-1] + b"\x07")
    with pytest.raises(StoreError, match="is damaged"):
        open_dataset(f"s3://{bucket}/text").tokens(TRAIN)
    store.put(file, good)
    assert open_dataset(f"s3://{bucket}/text").tokens(TRAIN).tobytes() == good


def _hold_lock(path: Path, held: Any) -> None:
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    held.set()
    threading.Event().wait()


def test_data_10_a_killed_download_stops_nobody(
    corpus: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path))
    split = write(corpus, f"s3://{bucket}/text").splits[TRAIN]
    (tmp_path / f"{split.sha256}.partial").write_bytes(b"half a file")
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=_hold_lock, args=(tmp_path / f"{split.sha256}.lock", held), daemon=True)
    holder.start()
    assert held.wait(10)
    holder.kill()
    holder.join()
    tokens = open_dataset(f"s3://{bucket}/text").tokens(TRAIN)
    assert len(tokens) == split.tokens
    assert tokens.dtype == np.uint16


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINRUN_CACHE", raising=False)
    monkeypatch.setenv("TRAINRUN_STATE", "/state")
    assert cache.cache_directory() == Path("/state/cache")
    monkeypatch.setenv("TRAINRUN_CACHE", "/cache")
    assert cache.cache_directory() == Path("/cache")
