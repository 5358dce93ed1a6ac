"""The metadata client, against a service of ours on 127.0.0.1."""

from __future__ import annotations

import time

import pytest

from trainrun.node.metadata import Identity, Metadata, MetadataError, identify


@pytest.fixture
def service(fake_metadata, monkeypatch):
    fake = fake_metadata(instance_id="i-0123", local_ipv4="10.0.0.7")
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.endpoint)
    return fake


@pytest.fixture
def metadata(service):
    return Metadata(timeout=0.3, attempts=3, pause=0.01)


def test_a_node_knows_itself(metadata):
    assert identify(metadata) == Identity(node="i-0123", address="10.0.0.7")


def test_one_token_serves_many_requests(service, metadata):
    for _ in range(3):
        metadata.get("instance-id")
    assert [method for method, _ in service.requests] == ["PUT", "GET", "GET", "GET"]


def test_an_old_token_is_renewed_before_it_expires(service, metadata, monkeypatch):
    metadata.get("instance-id")
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.95 * 21600)
    metadata.get("instance-id")
    assert [method for method, _ in service.requests] == ["PUT", "GET", "PUT", "GET"]


def test_ela_09_404_is_no_notice(metadata):
    assert metadata.get("spot/instance-action") is None


def test_ela_09_401_refreshes_the_token(service, metadata):
    metadata.get("instance-id")
    service.tokens.clear()  # as after a restart of the service
    assert metadata.get("instance-id") == "i-0123"
    assert [method for method, _ in service.requests] == ["PUT", "GET", "GET", "PUT", "GET"]


def test_ela_09_a_fresh_token_may_meet_a_404(service, metadata):
    metadata.get("instance-id")
    service.tokens.clear()
    assert metadata.get("spot/instance-action") is None


@pytest.mark.parametrize("fault", [500, 503, "silence"])
def test_ela_09_transient_errors_are_tried_again(service, metadata, fault):
    service.faults = [fault, fault]
    assert metadata.get("instance-id") == "i-0123"


def test_ela_09_a_lasting_error_is_an_error_and_not_an_absent_notice(service, metadata):
    service.faults = [500] * 3
    with pytest.raises(MetadataError, match=r"spot/instance-action gave no proper answer in 3 attempts .*500"):
        metadata.get("spot/instance-action")
    assert metadata.get("instance-id") == "i-0123"


def test_ela_09_version_1_is_never_asked(service, metadata):
    metadata.get("instance-id")
    service.tokens.clear()
    metadata.get("spot/instance-action")
    assert service.requests[0][0] == "PUT"
    assert all(path == "/latest/api/token" for method, path in service.requests if method == "PUT")


def test_what_every_instance_has_must_be_there(metadata):
    with pytest.raises(MetadataError, match="has no placement/region"):
        metadata.require("placement/region")


def test_it_fails_closed_where_metadata_is_disabled(fake_metadata, monkeypatch):
    fake = fake_metadata(instance_id="i-0123")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", fake.endpoint)
    with pytest.raises(MetadataError, match="leave this variable unset"):
        Metadata()
    assert fake.requests == []
