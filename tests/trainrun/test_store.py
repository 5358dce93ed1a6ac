"""The store keeps its promises on S3 and in a directory alike."""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import boto3
import pytest
from fault_store import FaultStore
from hypothesis import given
from hypothesis import strategies as st
from moto.s3.models import s3_backends

from trainrun import crc32, directory, s3_upload, store
from trainrun import s3 as s3_store
from trainrun.config import ConfigError
from trainrun.s3_requests import Requests
from trainrun.store import Range, Store, StoreError, StoreKeyMissing, open_store

MIB, GIB = 1024**2, 1024**3


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


@given(st.integers(0, 40 * 1024 * GIB) | st.sampled_from([100 * GIB, 5 * 1024 * GIB]))
def test_ckpt_11_parts_fit_the_limits_of_s3(size: int) -> None:
    part = s3_upload.part_size(size, "k")
    assert 5 * MIB <= part <= 5 * GIB
    assert -(-size // part) <= 10_000


def test_ckpt_11_an_object_too_large_for_s3_is_refused_before_its_first_byte(bucket: str, s3: Any) -> None:
    requests = Requests(read_timeout_seconds=1, attempts=1)
    with pytest.raises(StoreError, match=r"s3://b/k has 1073741824000000 bytes.*several objects"):
        s3_upload.Upload(requests, bucket="b", key="k", size=10**6 * GIB, read=lambda start, length: memoryview(b"")).send()
    assert not any("/b/k" in request for request in s3.requests)


@given(st.lists(st.binary(max_size=70)))
def test_the_checksum_of_a_whole_is_that_of_its_pieces(pieces: list[bytes]) -> None:
    assert crc32.joined((crc32.crc32(piece), len(piece)) for piece in pieces) == crc32.crc32(b"".join(pieces))


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


def test_data_11_forked_readers_have_clients_of_their_own(bucket: str, faults: FaultStore) -> None:
    """Through the proxy, for moto itself ends each connection after one request."""
    url = f"s3://{bucket}/objects"
    open_store(url).put("warm", b"")  # the parent's client has an open connection now
    for number in range(500):
        _put_at_once(bucket, f"objects/{number}", str(number).encode() * 500)
    context = multiprocessing.get_context("fork")
    readers = [context.Process(target=_read_all, args=(url, list(range(first, 500, 16)))) for first in range(16)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(120)
    assert [reader.exitcode for reader in readers] == [0] * 16


def _put_at_once(bucket: str, key: str, data: bytes) -> None:
    """Into moto without a request."""
    s3_backends["123456789012"]["aws"].put_object(bucket, key, data)


def test_survey_52_5000_objects_are_listed_and_deleted(bucket: str, tmp_path: Path) -> None:
    for number in range(5000):
        _put_at_once(bucket, f"run/many/{number:04}", b"")
        (tmp_path / f"{number:04}").touch()
    for where, prefix in ((open_store(f"s3://{bucket}/run"), "many/"), (open_store(str(tmp_path)), "")):
        keys = [item.key for item in where.list(prefix)]
        assert keys == [f"{prefix}{number:04}" for number in range(5000)]
        where.delete(keys)
        assert list(where.list()) == []


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


def test_ckpt_13_nothing_is_written_after_the_deadline(any_store: Store) -> None:
    for put in (any_store.put, any_store.put_new):
        with pytest.raises(StoreError, match=r"/late: .*the time for it is over"):
            put("late", b"x", deadline=time.monotonic() - 1)
    assert list(any_store.list()) == []


@pytest.mark.parametrize("put", ["put", "put_new"])
def test_ckpt_04_a_disk_that_gets_full_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: str
) -> None:
    """The kernel takes the first half of the file (here because of a limit of the process) and refuses the rest."""
    where = open_store(str(tmp_path))
    monkeypatch.setattr(directory, "CHUNK", 1000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5500, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"Could not write .*/step/k: .*File too large"):
            getattr(where, put)("step/k", bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_ckpt_04_a_disk_that_is_full_only_at_the_end_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    where = open_store(str(tmp_path))
    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(StoreError, match="No space left"):
        where.put("k", b"data")
    assert list(tmp_path.rglob("*")) == []


def test_a_reader_of_a_directory_sees_no_half_of_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "CHUNK", 100)
    where = open_store(str(tmp_path))
    where.put("k", bytes(10_000))
    seen: list[tuple[int, int, list[str]]] = []

    def look(written: int) -> None:
        data = where.get("k")
        seen.append((len(data), len(set(data)), [item.key for item in where.list()]))

    monkeypatch.setattr(directory, "SYNC_SIZE", 100)
    where.put("k", b"x" * 10_000, progress=look)
    assert seen == [(10_000, 1, ["k"])] * len(seen) and len(seen) >= 100
    assert where.get("k") == b"x" * 10_000


def test_a_file_that_a_killed_writer_left_can_be_swept(tmp_path: Path) -> None:
    where = open_store(str(tmp_path))
    left = tmp_path / "step" / "rank.bin.0123.partial"
    left.parent.mkdir()
    left.write_bytes(b"half")
    assert list(where.list()) == []  # it may be on its way
    os.utime(left, (time.time() - 2 * directory.ABANDONED_SECONDS,) * 2)
    where.delete([item.key for item in where.list("step/")])
    assert list(tmp_path.iterdir()) == []


def test_a_link_whose_answer_nfs_lost_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def linked_but_denied(source: Path, target: Path) -> None:
        link(source, target)
        raise FileExistsError(17, "File exists")

    monkeypatch.setattr(os, "link", linked_but_denied)
    where = open_store(str(tmp_path))
    assert where.put_new("k", b"first")
    assert not where.put_new("k", b"second")
    assert where.get("k") == b"first"


def test_new_directories_are_durable_like_the_object_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(directory, "_sync_directory", synced.append)
    open_store(str(tmp_path / "run")).put("step/attempt/k", b"x")
    assert set(synced) == {tmp_path, tmp_path / "run", tmp_path / "run/step", tmp_path / "run/step/attempt"}


@pytest.mark.parametrize("url", ["", "s3://", "http://host/x", "gs://bucket"])
def test_other_locations_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="s3://bucket/prefix"):
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
