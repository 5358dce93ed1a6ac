"""The store keeps its promises on S3 and in a directory alike."""

from __future__ import annotations

import multiprocessing
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import pytest

from trainrun import s3 as s3_store
from trainrun import s3_upload, store
from trainrun.store import Range, Store, StoreError, StoreKeyMissing, open_store


@pytest.fixture(params=["s3", "directory"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return open_store(f"s3://{request.getfixturevalue('bucket')}/some/prefix")
    return open_store(str(tmp_path / "store"))


def test_what_is_put_is_got_and_listed_in_order(any_store: Store) -> None:
    for key in ("b/2", "a", "b/1", "bb"):
        any_store.put(key, key.encode())
    any_store.put("a", memoryview(b"replaced"))
    assert any_store.get("a") == b"replaced"
    assert [o.key for o in any_store.list()] == ["a", "b/1", "b/2", "bb"]
    assert [(o.key, o.size) for o in any_store.list("b/")] == [("b/1", 3), ("b/2", 3)]
    assert [o.key for o in any_store.list("b")] == ["b/1", "b/2", "bb"]
    assert abs(next(any_store.list()).modified - time.time()) < 60
    assert any_store.child("b").get("2") == b"b/2"


def test_ranges_end_where_the_object_ends(any_store: Store) -> None:
    any_store.put("k", b"0123456789")
    assert any_store.get("k", 3, 4) == b"3456"
    assert any_store.get("k", 8, 100) == b"89"
    assert any_store.get("k", 100, 5) == b""
    assert any_store.get("k", 3) == b"3456789"
    assert any_store.get("k", 3, 0) == b""


def test_ranges_of_several_objects_are_read_into_memory(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "READ_BLOCK", 7)
    data = {key: os.urandom(50) for key in ("a", "b/c")}
    for key, value in data.items():
        any_store.put(key, value)
    memory = bytearray(100)
    slices = [("a", 0, 50), ("b/c", 3, 21), ("b/c", 49, 1), ("a", 50, 0), ("a", 10, 20)]
    ranges, at = [], 0
    for key, start, length in slices:
        ranges.append(Range(key, start, memoryview(memory)[at : at + length]))
        at += length
    complete: list[tuple[str, int, bool]] = []
    any_store.read_into(
        ranges, done=lambda r: complete.append((r.key, r.start, r.into == data[r.key][r.start : r.start + len(r.into)]))
    )
    assert sorted(complete) == sorted((key, start, True) for key, start, _ in slices)
    assert bytes(memory[:at]) == b"".join(data[key][start : start + length] for key, start, length in slices)


def test_a_range_past_the_end_of_an_object_is_an_error(any_store: Store) -> None:
    any_store.put("k", b"0123456789")
    with pytest.raises(StoreError, match=r"/k has less than the 12 bytes"):
        any_store.read_into([Range("k", 5, memoryview(bytearray(7)))])
    with pytest.raises(StoreKeyMissing, match="nowhere"):
        any_store.read_into([Range("nowhere", 5, memoryview(bytearray(7)))])


def test_what_a_check_of_a_range_raises_ends_the_reading(any_store: Store) -> None:
    any_store.put("k", b"0123456789")

    def refuse(item: Range) -> None:
        raise ValueError("damaged")

    with pytest.raises(ValueError, match="damaged"):
        any_store.read_into([Range("k", 0, memoryview(bytearray(7)))], done=refuse)


def test_a_new_object_is_written_once(any_store: Store) -> None:
    assert any_store.put_new("commit", b"first")
    assert not any_store.put_new("commit", b"second")
    assert any_store.get("commit") == b"first"
    assert [o.key for o in any_store.list()] == ["commit"]


def test_a_missing_key_is_named(any_store: Store) -> None:
    with pytest.raises(StoreKeyMissing, match="nowhere"):
        any_store.get("nowhere")
    with pytest.raises(KeyError):
        any_store.get("nowhere", 0, 4)


def test_more_keys_than_one_page_are_listed_and_deleted(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_store, "KEYS_PER_DELETE", 7)
    for i in range(20):
        any_store.put(f"many/{i:03}", b"")
    any_store.put("kept", b"")
    any_store.delete([o.key for o in any_store.list("many/")] + ["never-there"])
    assert [o.key for o in any_store.list()] == ["kept"]


def test_files_go_in_and_come_out(any_store: Store, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(bytes(range(256)) * 100)
    any_store.put_file("f", source)
    any_store.get_file("f", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_ckpt_11_parts_fit_the_limits_of_s3() -> None:
    mib, gib = 1024**2, 1024**3
    for size in (0, 1, 100 * gib, 5 * 1024 * gib, 40 * 1024 * gib):
        part = s3_upload.part_size(size, "k")
        assert 5 * mib <= part <= 5 * gib
        assert -(-size // part) <= 10_000
    with pytest.raises(StoreError, match="several objects"):
        s3_upload.part_size(1000 * 1024 * gib, "k")


def test_ckpt_11_a_large_object_goes_in_parts_and_comes_back_whole(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "PART_SIZE", 5 * 1024**2)
    data = bytes(range(251)) * 45_000  # 11 MB: three parts
    where = open_store(f"s3://{bucket}")
    where.put("big", data)
    assert where.get("big") == data
    assert where.get("big", 7_000_000, 1000) == data[7_000_000:7_001_000]
    assert boto3.client("s3").head_object(Bucket=bucket, Key="big")["ETag"].endswith('-3"')


def test_ckpt_12_an_upload_that_fails_leaves_no_parts(bucket: str, s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "PART_SIZE", 5 * 1024**2)
    s3.fail("partNumber=2")
    with pytest.raises(StoreError, match="SlowDown"):
        open_store(f"s3://{bucket}", attempts=1).put("big", bytes(11 * 1024**2))
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=bucket)


def _read_all(url: str, numbers: list[int]) -> None:
    where = open_store(url)
    assert all(where.get(str(number)) == str(number).encode() * 500 for number in numbers for _ in range(3))


def test_data_11_forked_readers_have_clients_of_their_own(bucket: str) -> None:
    url = f"s3://{bucket}/objects"
    for number in range(20):
        open_store(url).put(str(number), str(number).encode() * 500)  # the parent's client has open connections now
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=_read_all, args=(url, list(range(20)))) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(60)
    assert [reader.exitcode for reader in readers] == [0, 0, 0, 0]


def test_ckpt_13_a_server_that_never_answers_is_given_up_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted: list[socket.socket] = []
        threading.Thread(target=lambda: [accepted.append(server.accept()[0]) for _ in range(2)], daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        silent = open_store("s3://bucket/run", read_timeout_seconds=0.3, attempts=2)
        started = time.monotonic()
        with pytest.raises(StoreError, match=r"s3://bucket/run/rank-00001\.bin"):
            silent.put("rank-00001.bin", b"x" * 100)
        assert time.monotonic() - started < 10
        assert len(accepted) == 2


def test_ckpt_13_no_byte_is_sent_after_the_deadline(bucket: str) -> None:
    with pytest.raises(StoreError, match="the time for it is over"):
        open_store(f"s3://{bucket}", attempts=1).put("late", b"x", deadline=time.monotonic() - 1)
    assert list(open_store(f"s3://{bucket}").list()) == []


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    where = open_store(str(tmp_path))
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StoreError, match="No space left"):
        where.put("k", b"data")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("url", ["", "s3://", "http://host/x", "gs://bucket"])
def test_other_locations_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="s3://bucket/prefix"):
        open_store(url)


def test_keys_stay_inside_the_directory(tmp_path: Path) -> None:
    for key in ("../x", "/x", "a/../../x", ""):
        with pytest.raises(ValueError, match="is not a key"):
            open_store(str(tmp_path)).put(key, b"")


def test_a_directory_in_the_place_of_an_object_is_no_object(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    (tmp_path / "k" / "inner").mkdir(parents=True)
    (tmp_path / "file").write_text("x")
    for key in ("k", "file/below"):
        with pytest.raises(StoreKeyMissing, match=key):
            store.get(key)
        with pytest.raises(StoreError) as caught:
            store.put(key, b"x")
        assert not isinstance(caught.value, StoreKeyMissing)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "k"]


def test_a_directory_that_cannot_be_listed_does_not_pass_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a run whose checkpoints another user wrote would start anew."""
    store = open_store(str(tmp_path))
    store.put("step/k", b"x")
    scan = os.scandir

    def refuse(path: str | Path) -> Any:  # by hand, since no mode keeps root out
        if Path(path).name == "step":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match=r"Could not list .*Permission denied"):
        list(store.list())


def test_a_store_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert list(open_store(str(tmp_path / "nowhere")).list("step-")) == []
