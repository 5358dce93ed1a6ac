"""Which client takes bytes to S3 and back at the least cost: trainrun's store, boto3, the AWS CRT or s3torchconnector?

Each contender runs in a process of its own, at nice 19 and without torch, as the writer of checkpoints does, several times in
turn. The server is a sink (`support.sink`), which throws away what it gets, because moto is slower than any client. Printed are
the medians of MB/s, of the client's CPU seconds per GB (the number that a training step beside it feels) and of the seconds from
the start of Python to the first small object written.

    python benchmarks/store.py --rounds 5 --json build/store.json

awscrt and s3torchconnectorclient are measured where they are installed (`--path` adds a directory to look for them).
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from support.sink import MIB, PATTERN, environment, running_sink

ROOT = Path(__file__).parents[1]
BUCKET = "bucket"


class Contender(NamedTuple):
    """How to write an object and how to read it, once connected."""

    put: Callable[[str, memoryview], object]
    get: Callable[[str, memoryview], object]
    """Fills the memory."""


# Contenders: each imports what it needs, for that is part of its start


def trainrun_store(endpoint: str) -> Contender:
    from trainrun.store import Range, open_store

    store = open_store(f"s3://{BUCKET}")
    return Contender(store.put, lambda key, into: store.read_into([Range(key, 0, into)]))


def boto3_threads(endpoint: str) -> Contender:
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client("s3", config=Config(s3={"addressing_style": "path", "payload_signing_enabled": False}))
    config = TransferConfig(multipart_chunksize=32 * MIB, multipart_threshold=32 * MIB, max_concurrency=8)
    return Contender(
        lambda key, data: client.upload_fileobj(_file(data), BUCKET, key, Config=config),
        lambda key, into: client.download_fileobj(BUCKET, key, _Into(into), Config=config),
    )


def boto3_crt(endpoint: str) -> Contender:
    """What boto3 does with ``preferred_transfer_client="crt"``, which itself passes no endpoint on."""
    import awscrt.auth
    import botocore.session
    from s3transfer.crt import BotocoreCRTRequestSerializer, CRTTransferManager, create_s3_crt_client

    session = botocore.session.Session()
    serializer = BotocoreCRTRequestSerializer(session, {"endpoint_url": endpoint, "region_name": "us-east-1"})
    provider = awscrt.auth.AwsCredentialsProvider.new_static("a", "b")
    client = create_s3_crt_client("us-east-1", crt_credentials_provider=provider, use_ssl=False, part_size=32 * MIB)
    manager = CRTTransferManager(client, serializer)
    return Contender(
        lambda key, data: manager.upload(_file(data), BUCKET, key).result(),
        lambda key, into: manager.download(BUCKET, key, _Into(into)).result(),
    )


def awscrt_client(endpoint: str) -> Contender:
    import awscrt.auth as auth
    import awscrt.http as http
    import awscrt.io
    import awscrt.s3 as s3

    host = endpoint.removeprefix("http://")
    client = s3.S3Client(
        bootstrap=awscrt.io.ClientBootstrap.get_or_create_static_default(),
        region="us-east-1",
        credential_provider=auth.AwsCredentialsProvider.new_static("a", "b"),
        tls_mode=s3.S3RequestTlsMode.DISABLED,
        part_size=32 * MIB,
    )

    def headers(*more: tuple[str, str]) -> Any:
        return http.HttpHeaders([("Host", host), *more])

    def put(key: str, data: memoryview) -> None:
        request = http.HttpRequest("PUT", f"/{BUCKET}/{key}", headers(("Content-Length", str(len(data)))), _file(data))
        checksum = s3.S3ChecksumConfig(algorithm=s3.S3ChecksumAlgorithm.CRC64NVME, location=s3.S3ChecksumLocation.TRAILER)
        client.make_request(type=s3.S3RequestType.PUT_OBJECT, request=request, checksum_config=checksum).finished_future.result()

    def get(key: str, into: memoryview) -> None:
        def take(chunk: bytes, offset: int, **_: Any) -> None:
            into[offset : offset + len(chunk)] = chunk

        request = http.HttpRequest("GET", f"/{BUCKET}/{key}", headers())
        client.make_request(type=s3.S3RequestType.GET_OBJECT, request=request, on_body=take).finished_future.result()

    return Contender(put, get)


def s3torchconnector(endpoint: str) -> Contender:
    """The client under it, as its reader and writer of DCP use it."""
    from s3torchconnectorclient._mountpoint_s3_client import MountpointS3Client

    client = MountpointS3Client("us-east-1", part_size=32 * MIB, endpoint=endpoint, force_path_style=True)

    def put(key: str, data: memoryview) -> None:
        stream = client.put_object(BUCKET, key)
        for start in range(0, len(data), 32 * MIB):
            stream.write(bytes(data[start : start + 32 * MIB]))  # it takes nothing but bytes
        stream.close()

    def get(key: str, into: memoryview) -> None:
        at = 0
        for chunk in client.get_object(BUCKET, key):
            into[at : at + len(chunk)] = chunk
            at += len(chunk)

    return Contender(put, get)


CONTENDERS = {
    function.__name__: function for function in (trainrun_store, boto3_threads, boto3_crt, awscrt_client, s3torchconnector)
}


def _file(data: memoryview) -> Any:
    class File(io.RawIOBase):
        at = 0

        def readable(self) -> bool:
            return True

        def seekable(self) -> bool:
            return True

        def tell(self) -> int:
            return self.at

        def seek(self, offset: int, whence: int = 0) -> int:
            self.at = offset + (0, self.at, len(data))[whence]
            return self.at

        def readinto(self, into: Any) -> int:
            count = min(len(into), len(data) - self.at)
            memoryview(into)[:count] = data[self.at : self.at + count]
            self.at += count
            return count

    return File()


class _Into:
    """A file over memory, for clients that write downloads to one."""

    def __init__(self, into: memoryview) -> None:
        self._into, self._at = into, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def write(self, data: bytes) -> int:
        self._into[self._at : self._at + len(data)] = data
        self._at += len(data)
        return len(data)


def measure(name: str, endpoint: str, megabytes: int) -> dict[str, float]:
    """One contender, in this process."""
    os.nice(19)
    contender = CONTENDERS[name](endpoint)
    contender.put("small", memoryview(b"x" * 1000))
    result = {"start_s": time.time() - float(os.environ["STARTED"])}
    data = memoryview(bytearray(megabytes * MIB))
    data[:] = _content(megabytes)
    contender.put("warm", data[: 40 * MIB])
    gigabytes = len(data) / 1e9
    for verb, call in (("put", contender.put), ("get", contender.get)):
        if verb == "get":
            data[:] = bytes(len(data))
        began, cpu = time.perf_counter(), _cpu()
        call("big", data)
        result[f"{verb}_mb_s"] = len(data) / 1e6 / (time.perf_counter() - began)
        result[f"{verb}_cpu_s_gb"] = (_cpu() - cpu) / gigabytes
    assert zlib.crc32(data) == zlib.crc32(_content(megabytes)), "read something else"
    return result


def _content(megabytes: int) -> bytes:
    return PATTERN * (megabytes * MIB // len(PATTERN))


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=512, help="MiB of the object")
    parser.add_argument("--path", action="append", default=[], help="directory with further clients")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--endpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sys.path += options.path
    if options.measure:
        print(json.dumps(measure(options.measure, options.endpoint, options.megabytes)))
    else:
        compare(options)


def compare(options: argparse.Namespace) -> None:
    again = [sys.executable, str(Path(__file__)), f"--megabytes={options.megabytes}", *(f"--path={p}" for p in options.path)]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS if _is_there(name)}
    with running_sink() as endpoint:
        for _ in range(options.rounds):
            for name, rows in results.items():
                rows.append(_run([*again, f"--measure={name}", f"--endpoint={endpoint}"], endpoint))
    medians = {name: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for name, rows in results.items()}
    columns = ["put_mb_s", "put_cpu_s_gb", "get_mb_s", "get_cpu_s_gb", "start_s"]
    print(f"{'':18}" + "".join(f"{column:>14}" for column in columns))
    for name, row in medians.items():
        print(f"{name:18}" + "".join(f"{row[column]:14.2f}" for column in columns))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(medians, indent=2))


def _is_there(name: str) -> bool:
    module = {"boto3_crt": "awscrt", "awscrt_client": "awscrt", "s3torchconnector": "s3torchconnectorclient"}.get(name)
    if module and importlib.util.find_spec(module) is None:
        print(f"{name} is left out: there is no {module}.")
        return False
    return True


def _run(command: list[str], endpoint: str) -> dict[str, float]:
    own = {"PYTHONPATH": str(ROOT / "training"), "STARTED": str(time.time())}
    out = subprocess.run(command, env={**environment(endpoint), **own}, capture_output=True, text=True, timeout=300)
    if out.returncode:
        raise SystemExit(out.stderr)
    result: dict[str, float] = json.loads(out.stdout.splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
