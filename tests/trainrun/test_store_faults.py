"""What goes wrong between a node and S3 is survived, or told with the object's name."""

from __future__ import annotations

import os

import boto3
import pytest
from fault_store import Faults, FaultStore

from trainrun.store import open_store


def test_faults_happen_as_told_also_from_another_process(bucket: str, faults: FaultStore) -> None:
    client = boto3.client("s3", config=boto3.session.Config(retries={"total_max_attempts": 1}))
    told = Faults(faults.endpoint)
    told.fail("PUT .*/k", "answer", times=2, skip=1)
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


@pytest.mark.parametrize("kind", ["drop", "lose"])
def test_a_harmed_request_is_made_again(bucket: str, faults: FaultStore, kind: str) -> None:
    data = os.urandom(300_000)
    faults.fail("/k", kind, times=2, after=100_000 if kind != "lose" else 0)
    where = open_store(f"s3://{bucket}")
    where.put("k", data)
    assert where.get("k") == data
    assert faults.count("/k") == 4
