"""What goes wrong between a node and S3 is survived, or told with the object's name within the time given."""

from __future__ import annotations

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from fault_store import Faults, FaultStore

from trainrun import s3_upload
from trainrun.store import Range, Store, StoreError, StoreKeyMissing, open_store

MIB = 1024**2


@pytest.fixture
def where(bucket: str, faults: FaultStore, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store behind the proxy, which sends what is larger than 5 MiB in parts."""
    monkeypatch.setattr(s3_upload, "PART_SIZE", 5 * MIB)
    return open_store(f"s3://{bucket}/run")


@pytest.fixture(scope="module")
def large() -> bytes:
    """Three parts."""
    return os.urandom(11 * MIB)


def has_parts(bucket: str) -> bool:
    return "Uploads" in boto3.client("s3").list_multipart_uploads(Bucket=bucket)


def test_faults_happen_as_told_also_from_another_process(bucket: str, faults: FaultStore) -> None:
    client = boto3.client("s3", config=boto3.session.Config(retries={"total_max_attempts": 1}))
    told = Faults(faults.endpoint)
    told.fail("PUT .*/k", times=2, skip=1)
    codes = []
    for _ in range(4):
        try:
            client.put_object(Bucket=bucket, Key="k", Body=b"x")
            codes.append("ok")
        except client.exceptions.ClientError as error:
            codes.append(error.response["Error"]["Code"])
    assert codes == ["ok", "SlowDown", "SlowDown", "ok"]
    assert told.count("PUT .*/k") == 4
    told.heal()
    assert told.requests == []


# Writes


@pytest.mark.parametrize(
    "fault",
    [
        {"kind": "drop", "after": 100_000},
        {"kind": "lose"},
        {"kind": "corrupt", "after": 100_000},
        {"kind": "answer"},
        {"kind": "answer", "status": 500, "code": "InternalError"},
        {"kind": "answer", "status": 400, "code": "RequestTimeout"},
    ],
    ids=lambda fault: f"{fault['kind']}-{fault.get('code', '')}",
)
def test_ckpt_12_a_write_that_was_harmed_is_made_again(where: Store, faults: FaultStore, large: bytes, fault: Any) -> None:
    faults.fail("PUT .*/small", times=2, **fault)
    where.put("small", large[:300_000])
    assert faults.count("PUT .*/small") == 3
    faults.fail("PUT .*/large.*partNumber=2", times=2, **fault)
    where.put("large", large)
    assert [faults.count(f"PUT .*/large.*partNumber={number}$") for number in (1, 2, 3)] == [1, 3, 1]
    faults.heal()
    assert where.get("small") == large[:300_000] and where.get("large") == large


def test_a_part_that_changes_on_its_way_is_refused_and_in_the_end_named(
    where: Store, bucket: str, faults: FaultStore, large: bytes
) -> None:
    faults.fail("partNumber=3", "corrupt", after=1000)
    with pytest.raises(StoreError, match=rf"Could not write s3://{bucket}/run/large: .*BadDigest.*tried 2 times"):
        open_store(f"s3://{bucket}/run", attempts=2).put("large", large)
    assert not has_parts(bucket)
    assert list(where.list()) == []


def test_s3_checks_the_whole_object_too(where: Store, bucket: str, large: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_upload, "joined", lambda pieces: 1)
    with pytest.raises(StoreError, match=r"BadDigest.*CompleteMultipartUpload"):
        open_store(f"s3://{bucket}/run", attempts=1).put("large", large)
    assert list(where.list()) == []


@pytest.mark.parametrize("size", [1000, 11 * MIB])
def test_a_write_whose_answer_was_lost_is_known_again(where: Store, faults: FaultStore, large: bytes, size: int) -> None:
    last_request = r"POST .*/k\?uploadId" if size > MIB else r"PUT .*/k\?"
    faults.fail(last_request, "lose", times=1)
    assert where.put_new("k", large[:size])
    assert faults.count(last_request) == 2
    faults.fail(last_request, "lose", times=1)
    assert not where.put_new("k", large[1 : size + 1])
    faults.heal()
    assert where.get("k") == large[:size]


def test_a_write_in_parts_whose_answer_was_lost_is_no_failure(where: Store, faults: FaultStore, large: bytes) -> None:
    faults.fail("POST .*/k.uploadId", "lose", times=1)
    where.put("k", large)
    faults.heal()
    assert where.get("k") == large


@pytest.mark.parametrize(
    "fault", [{"kind": "answer"}, {"kind": "silence"}, {"kind": "drop"}], ids=lambda fault: str(fault["kind"])
)
def test_ckpt_13_a_write_ends_at_its_deadline_and_leaves_no_parts(
    where: Store, bucket: str, faults: FaultStore, large: bytes, fault: Any
) -> None:
    faults.fail("partNumber=2", **fault)
    patient = open_store(f"s3://{bucket}/run", attempts=1000)
    started = time.monotonic()
    with pytest.raises(StoreError, match=rf"s3://{bucket}/run/large: .* The time for it is over"):
        patient.put("large", large, deadline=started + 3)
    assert time.monotonic() - started < 8
    faults.heal()
    assert not has_parts(bucket)


def test_progress_counts_every_byte_once(where: Store, faults: FaultStore, large: bytes, tmp_path: Path) -> None:
    faults.fail("partNumber=2", "drop", times=1, after=4 * MIB)
    for store in (where, open_store(str(tmp_path))):
        told: list[int] = []
        store.put("large", large, progress=told.append)
        assert max(told) == len(large)
    assert faults.count("partNumber=2") == 2


def test_writes_that_only_make_new_objects_pass_a_policy_that_demands_it(
    where: Store, bucket: str, faults: FaultStore, large: bytes
) -> None:
    """Survey bug 55: such a policy refuses copies, and all other writes."""
    faults.fail(r"^PUT [^?]*\?$|^POST [^?]*\?uploadId", lacking="If-None-Match", status=403, code="AccessDenied")
    assert where.put_new("small", b"x") and where.put_new("large", large)
    assert not where.put_new("large", large)
    with pytest.raises(StoreError, match=r"/run/small: .*AccessDenied"):
        where.put("small", b"y")
    where.delete(["small"])
    assert [item.key for item in where.list()] == ["large"]
    assert not has_parts(bucket)


# Reads


def test_a_read_goes_on_where_a_connection_broke(where: Store, faults: FaultStore, large: bytes) -> None:
    where.put("k", large[:MIB])
    memory = bytearray(MIB)
    faults.fail("GET .*/k", "truncate", times=3, after=300_000)
    where.read_into([Range("k", 0, memoryview(memory))])
    assert faults.count("GET .*/k") == 4
    assert memory == large[:MIB]


@pytest.mark.parametrize(
    "fault", [{"kind": "truncate", "after": 1000}, {"kind": "drop"}, {"kind": "answer"}, {"kind": "corrupt answer", "after": 7}]
)
def test_a_whole_object_is_read_again(where: Store, faults: FaultStore, large: bytes, fault: Any) -> None:
    where.put("k", large[:300_000])
    faults.fail("GET .*/k", times=2, **fault)
    assert where.get("k") == large[:300_000]
    assert faults.count("GET .*/k") == 3


def test_a_read_ends_at_its_deadline(where: Store, bucket: str, faults: FaultStore) -> None:
    where.put("k", b"0123456789")
    faults.fail("GET .*/k", "silence")
    started = time.monotonic()
    with pytest.raises(StoreError, match=rf"Could not read s3://{bucket}/run/k: .* The time for it is over"):
        where.read_into([Range("k", 0, memoryview(bytearray(10)))], deadline=started + 1.5)
    assert time.monotonic() - started < 5


def test_an_object_that_is_missing_is_asked_for_once(where: Store, faults: FaultStore) -> None:
    with pytest.raises(StoreKeyMissing, match="/run/nowhere"):
        where.get("nowhere")
    assert faults.count("GET .*/nowhere") == 1


def test_lists_and_deletions_are_tried_again(where: Store, faults: FaultStore) -> None:
    for key in "abc":
        where.put(key, b"")
    faults.fail(r"list-type|POST .*\?delete", "drop", times=1)
    faults.fail(r"list-type|POST .*\?delete", times=1)
    assert [item.key for item in where.list()] == ["a", "b", "c"]
    faults.fail(r"POST .*\?delete", "lose", times=1)
    where.delete("abc")
    assert list(where.list()) == []


# Credentials


def test_credentials_that_expired_are_asked_for_anew(
    where: Store, faults: FaultStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "provider").write_text(
        f"echo >> {tmp_path}/calls; n=$(wc -l < {tmp_path}/calls); "
        'printf \'{"Version": 1, "AccessKeyId": "key%s", "SecretAccessKey": "s", "SessionToken": "t"}\' $n'
    )
    (tmp_path / "config").write_text(f"[default]\ncredential_process = sh {tmp_path}/provider\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    faults.fail("PUT .*/k", times=1, status=400, code="ExpiredToken")
    where.put("k", b"x")
    assert faults.count("PUT .*/k") == 2
    assert len((tmp_path / "calls").read_text()) >= 2


def test_expired_credentials_that_nothing_renews_are_said_at_once(where: Store, bucket: str, faults: FaultStore) -> None:
    faults.fail("PUT .*/k", status=400, code="ExpiredToken")
    with pytest.raises(StoreError, match=rf"s3://{bucket}/run/k: .*ExpiredToken.* nothing renews them"):
        where.put("k", b"x")
    assert faults.count("PUT .*/k") == 1


def test_a_host_that_does_not_tell_its_role_at_once_is_asked_again(
    where: Store, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    asked: list[str] = []

    class Metadata(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            asked.append(self.path)
            self.send_response(500 if asked.count(self.path) < 3 else 200)
            self.end_headers()
            role = {
                "Code": "Success",
                "AccessKeyId": "a",
                "SecretAccessKey": "b",
                "Token": "t",
                "Expiration": "2099-01-01T00:00:00Z",
            }
            self.wfile.write(b"role" if self.path.endswith("security-credentials/") else json.dumps(role).encode())

        do_GET = do_PUT = do_any

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    request.addfinalizer(server.shutdown)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_EC2_METADATA_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    where.put("k", b"x")
    assert where.get("k") == b"x"
    assert len(asked) >= 7
