"""The metadata service, asked over HTTP as a node would ask it."""

import json
import socket
import time
import urllib.error
import urllib.request

import pytest

from trainlocal.fleet.imds import LIFETIME_HEADER, TOKEN_HEADER, MetadataServer, items_of


class Client:
    def __init__(self, server):
        self.server = server
        self.base = f"http://127.0.0.1:{server.port}"

    def ask(self, path, method="GET", **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(self.base + path, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def token(self, lifetime="60"):
        status, token = self.ask("/latest/api/token", "PUT", **{LIFETIME_HEADER: lifetime})
        assert status == 200
        return token

    def get(self, path):
        return self.ask(path, **{TOKEN_HEADER: self.token()})


@pytest.fixture
def client(an_instance):
    server = MetadataServer(socket.create_server(("127.0.0.1", 0)), items_of(an_instance))
    yield Client(server)
    server.close()


def test_a_get_without_a_token_is_refused(client):
    assert client.ask("/latest/meta-data/instance-id")[0] == 401


def test_an_unknown_token_is_refused(client):
    assert client.ask("/latest/meta-data/instance-id", **{TOKEN_HEADER: "made-up"})[0] == 401


@pytest.mark.parametrize("lifetime", ["", "0", "-1", "21601", "1.5", "a", "²"])
def test_a_token_needs_a_lifetime_of_1_to_21600_seconds(client, lifetime):
    headers = {LIFETIME_HEADER: lifetime.encode("utf-8").decode("latin-1")} if lifetime else {}
    assert client.ask("/latest/api/token", "PUT", **headers)[0] == 400


def test_a_forwarded_request_for_a_token_is_refused(client):
    assert client.ask("/latest/api/token", "PUT", X_Forwarded_For="10.0.0.9", **{LIFETIME_HEADER: "60"})[0] == 403


def test_ela_09_a_token_expires_and_a_new_one_is_to_be_had(client):
    token = client.token("1")
    assert client.ask("/latest/meta-data/instance-id", **{TOKEN_HEADER: token})[0] == 200
    deadline = time.monotonic() + 5
    while client.ask("/latest/meta-data/instance-id", **{TOKEN_HEADER: token})[0] == 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert client.ask("/latest/meta-data/instance-id", **{TOKEN_HEADER: token})[0] == 401
    assert client.get("/latest/meta-data/instance-id")[0] == 200


def test_it_knows_the_instance(client, an_instance):
    expected = {
        "meta-data/instance-id": an_instance.id,
        "meta-data/local-ipv4": an_instance.address,
        "meta-data/hostname": an_instance.hostname,
        "meta-data/placement/region": an_instance.region,
        "meta-data/placement/availability-zone": an_instance.zone,
        "meta-data/mac": an_instance.mac,
        f"meta-data/network/interfaces/macs/{an_instance.mac}/local-ipv4s": an_instance.address,
        "meta-data/tags/instance/Name": "a node",
        "user-data": "#!/bin/bash\ntrue\n",
    }
    for path, content in expected.items():
        assert client.get(f"/latest/{path}") == (200, content), path


def test_the_identity_document_agrees_with_it(client, an_instance):
    document = json.loads(client.get("/latest/dynamic/instance-identity/document")[1])
    assert (document["instanceId"], document["privateIp"], document["region"]) == (
        an_instance.id,
        an_instance.address,
        an_instance.region,
    )


def test_credentials_of_the_role_are_valid_for_hours(client, an_instance):
    assert client.get("/latest/meta-data/iam/security-credentials/") == (200, an_instance.role)
    credentials = json.loads(client.get(f"/latest/meta-data/iam/security-credentials/{an_instance.role}")[1])
    assert credentials["Code"] == "Success"
    expiry = time.mktime(time.strptime(credentials["Expiration"], "%Y-%m-%dT%H:%M:%SZ")) - time.timezone
    assert 5 * 3600 < expiry - time.time() <= 6 * 3600


def test_folders_are_listed_with_a_slash_behind_folders(client):
    names = client.get("/latest/meta-data/")[1].split()
    assert {"instance-id", "placement/", "iam/", "network/"} <= set(names)
    assert client.get("/2021-03-23/meta-data/placement/")[1].split() == ["availability-zone", "region"]


@pytest.mark.parametrize(
    "path", ["/latest/meta-data/nothing", "/1.0/meta-data/instance-id", "/latest/meta-data/spot/instance-action"]
)
def test_what_there_is_not_is_not_found(client, path):
    assert client.get(path)[0] == 404


def test_ela_09_a_spot_notice_appears_and_goes(client):
    notice = '{"action": "terminate", "time": "2030-01-01T00:00:00Z"}'
    client.server.set("meta-data/spot/instance-action", notice)
    client.server.set("meta-data/events/recommendations/rebalance", '{"noticeTime": "2030-01-01T00:00:00Z"}')
    assert client.get("/latest/meta-data/spot/instance-action") == (200, notice)
    assert client.get("/latest/meta-data/events/recommendations/rebalance")[0] == 200
    client.server.set("meta-data/spot/instance-action", None)
    assert client.get("/latest/meta-data/spot/instance-action")[0] == 404


def test_ela_09_it_fails_as_it_is_told_to_and_works_again(client):
    token = client.token()
    client.server.fail("error")
    assert client.ask("/latest/meta-data/instance-id", **{TOKEN_HEADER: token})[0] == 500
    assert client.ask("/latest/api/token", "PUT", **{LIFETIME_HEADER: "60"})[0] == 500
    client.server.fail("silence")
    request = urllib.request.Request(f"{client.base}/latest/meta-data/instance-id", headers={TOKEN_HEADER: token})
    with pytest.raises(TimeoutError):
        urllib.request.urlopen(request, timeout=0.3)
    client.server.fail(None)
    assert client.ask("/latest/meta-data/instance-id", **{TOKEN_HEADER: token})[0] == 200
    with pytest.raises(ValueError, match="cannot fail by 'fire'; it knows error, silence"):
        client.server.fail("fire")
