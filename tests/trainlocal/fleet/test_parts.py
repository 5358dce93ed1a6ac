"""Parts of the fleet that can be looked at one by one: control requests, plain processes, the environment, the loop."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import trainlocal
from trainlocal.environment import cdk_environment, cloud_environment
from trainlocal.fleet.control import ControlServer, ask
from trainlocal.fleet.fleet import Fleet
from trainlocal.fleet.places import Places
from trainlocal.fleet.plain import MARK, kill_all, processes_of
from trainlocal.local import Local


def test_requests_are_answered_and_errors_come_back_as_text(tmp_path):
    def handle(request):
        if "wrong" in request:
            raise ValueError("that is wrong")
        return {"got": request}

    server = ControlServer(tmp_path / "control.sock", handle)
    try:
        assert ask(tmp_path / "control.sock", {"a": 1}) == {"got": {"a": 1}}
        with pytest.raises(ValueError, match="that is wrong"):
            ask(tmp_path / "control.sock", {"wrong": 1})
    finally:
        server.close()
    with pytest.raises(OSError):
        ask(tmp_path / "control.sock", {})


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can name a deep socket by a descriptor of its folder")
def test_a_socket_may_lie_deeper_than_an_address_is_long(tmp_path):
    deep = tmp_path.joinpath(*["a-rather-long-name-of-a-folder"] * 5)
    deep.mkdir(parents=True)
    server = ControlServer(deep / "control.sock", lambda request: {"ok": True})
    try:
        assert ask(deep / "control.sock", {}) == {"ok": True}
    finally:
        server.close()


def test_processes_of_a_plain_node_are_found_in_whatever_session_and_killed(tmp_path):
    root, other = tmp_path / "i-1", tmp_path / "i-11"
    script = "import os, time; os.fork(); os.setsid() if os.getpid() != os.getsid(0) else None; time.sleep(60)"
    ours, theirs = (
        subprocess.Popen([sys.executable, "-c", script], env={**os.environ, MARK: str(folder)}, start_new_session=True)
        for folder in (root, other)
    )
    try:
        deadline = time.monotonic() + 10
        while len(processes_of(root)) < 2 or len(processes_of(other)) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        kill_all(root)
        assert ours.wait(5) == -signal.SIGKILL
        assert processes_of(root) == [] and len(processes_of(other)) == 2
    finally:
        kill_all(tmp_path)
        theirs.wait(5)
    assert processes_of(tmp_path) == []


def test_the_environment_points_at_the_cloud_and_nowhere_else(tmp_path):
    variables = {**cloud_environment("http://127.0.0.1:1234"), **cdk_environment(tmp_path)}
    assert variables["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1234"
    assert variables["AWS_EC2_METADATA_DISABLED"] == "true"
    assert variables["AWS_CONFIG_FILE"] == variables["AWS_SHARED_CREDENTIALS_FILE"] == os.devnull
    assert variables["CDK_HOME"] == str(tmp_path)
    assert "127.0.0.1" in variables["NO_PROXY"]
    node = subprocess.run(["node", "--version"], env=variables, capture_output=True, text=True, check=True).stdout
    assert int(node.lstrip("v").split(".")[0]) >= 22


class Account:
    """An account whose instances the test sets."""

    def __init__(self, instance):
        self.instance, self.ids, self.terminated, self.ending = instance, [], [], set()

    def live(self):
        return {instance_id: {"InstanceId": instance_id} for instance_id in self.ids}

    def leaving(self):
        return self.ending

    def describe(self, raw):
        return type(self.instance)(**{**vars(self.instance), "id": raw["InstanceId"]})

    def terminate(self, instance_id):
        self.ids.remove(instance_id)
        self.terminated.append(instance_id)


class Told(list):
    """What was set in a node's metadata."""

    def set(self, path, content):
        self.append((path, content))


class Machine:
    """A node made of nothing that ends when it is told to, unless it is stubborn."""

    pid = 7

    def __init__(self, stubborn=False):
        self.metadata = Told()
        self.result, self.ended, self.stubborn, self.closed = None, False, stubborn, False

    def has_ended(self):
        return self.ended

    def boot_result(self):
        return self.result

    def end(self):
        self.ended = not self.stubborn

    def kill(self):
        self.ended = True

    def close(self):
        self.closed = True


class Maker:
    def __init__(self):
        self.made, self.refuses = {}, None

    def boot(self, instance, folder):
        if self.refuses:
            raise self.refuses
        return self.made.setdefault(instance.id, Machine())


@pytest.fixture
def fleet(an_instance, tmp_path):
    return Fleet(Account(an_instance), Maker(), tmp_path)


def states(fleet):
    return {node["instance_id"]: node["state"] for node in fleet.answer({"do": "nodes"})["nodes"]}


def test_the_fleet_follows_the_account(fleet):
    account, made = fleet._account, fleet._maker.made
    account.ids = ["i-1", "i-2"]
    fleet._boot_and_end()
    assert states(fleet) == {"i-1": "booting", "i-2": "booting"}
    made["i-1"].result = json.dumps({"v1": {"errors": []}})
    made["i-2"].result = json.dumps({"v1": {"errors": ["a script failed"]}})
    fleet._boot_and_end()
    assert states(fleet) == {"i-1": "running", "i-2": "failed"}
    account.ids = ["i-1"]
    fleet._boot_and_end()
    assert states(fleet)["i-2"] == "ending"
    fleet._boot_and_end()
    assert states(fleet) == {"i-1": "running", "i-2": "dead"} and made["i-2"].closed
    assert account.terminated == []


def test_a_node_is_told_once_that_its_group_is_about_to_end_it(fleet):
    account, made = fleet._account, fleet._maker.made
    account.ids, account.ending = ["i-1", "i-2"], {"i-2"}
    for _ in range(2):
        fleet._boot_and_end()
    assert (made["i-1"].metadata, made["i-2"].metadata) == ([], [("meta-data/autoscaling/target-lifecycle-state", "Terminated")])


def test_the_instance_of_a_node_that_died_is_terminated_so_that_its_group_replaces_it(fleet):
    fleet._account.ids = ["i-1"]
    fleet._boot_and_end()
    fleet.answer({"do": "kill", "instance_id": "i-1"})
    fleet._boot_and_end()
    assert fleet._account.terminated == ["i-1"]
    assert states(fleet) == {"i-1": "dead"}
    with pytest.raises(ValueError, match=r"no running node 'i-1'; running are: none"):
        fleet.answer({"do": "kill", "instance_id": "i-1"})


@pytest.mark.parametrize("reason", [OSError("no room"), ValueError("no room for it")])
def test_an_instance_whose_node_cannot_be_started_is_terminated(fleet, reason):
    fleet._maker.refuses = reason
    fleet._account.ids = ["i-1"]
    fleet._boot_and_end()
    assert fleet._account.terminated == ["i-1"]
    assert "no room" in fleet.answer({"do": "nodes"})["nodes"][0]["detail"]


def test_an_instance_that_could_not_be_terminated_is_terminated_at_the_next_look(fleet, monkeypatch):
    fleet._account.ids = ["i-1"]
    fleet._boot_and_end()
    fleet._maker.made["i-1"].kill()
    with monkeypatch.context() as patch:
        patch.setattr(fleet._account, "terminate", lambda instance_id: [][0])
        with pytest.raises(IndexError):
            fleet._boot_and_end()
    fleet._boot_and_end()
    assert fleet._account.terminated == ["i-1"]
    assert states(fleet) == {"i-1": "dead"}


def test_a_node_that_does_not_shut_down_in_time_is_killed(fleet, monkeypatch):
    monkeypatch.setattr("trainlocal.fleet.fleet._SHUT_DOWN_SECONDS", 0.05)
    fleet._maker.made["i-1"] = Machine(stubborn=True)
    fleet._account.ids = ["i-1"]
    fleet._boot_and_end()
    fleet._account.ids = []
    fleet._boot_and_end()
    assert states(fleet) == {"i-1": "ending"}
    time.sleep(0.06)
    fleet._boot_and_end()
    fleet._boot_and_end()
    assert states(fleet) == {"i-1": "dead"}


def test_a_cloud_that_is_not_there_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(trainlocal.LocalError, match="python -m trainlocal up"):
        trainlocal.attach(tmp_path)


def test_a_tier_that_is_not_to_be_had_ends_the_start_with_its_reason(tmp_path):
    other = "isolated-user" if os.geteuid() == 0 else "isolated-root"
    with pytest.raises(trainlocal.LocalError, match="not to be had on this machine"):
        trainlocal.start(tmp_path, other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["logs", "nodes"]


def test_a_listening_socket_is_handed_over(tmp_path):
    """The fleet's side of the contract of cloud.sock, against a receiver that serves one request."""
    receiver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    receiver.bind(str(tmp_path / "s"))
    receiver.listen()
    program = (
        "import socket, sys\n"
        f"sys.path.insert(0, {str(Path(trainlocal.__file__).parents[1])!r})\n"
        "from trainlocal.fleet.control import hand_over\n"
        "from pathlib import Path\n"
        f"hand_over(Path({str(tmp_path / 's')!r}), socket.create_server(('127.0.0.1', 0)))\n"
    )
    giver = subprocess.Popen([sys.executable, "-c", program])
    with receiver, receiver.accept()[0] as connection:
        connection.settimeout(10)
        _, (descriptor,), _, _ = socket.recv_fds(connection, 1, 1)
        connection.sendall(b'{"serving": "here"}\n')
        assert giver.wait(10) == 0
        with socket.socket(fileno=descriptor) as passed, socket.create_connection(passed.getsockname(), 5) as client:
            served, _ = passed.accept()
            with served:
                served.sendall(b"hello")
            assert client.recv(5) == b"hello"


def test_nothing_of_the_users_own_aws_reaches_what_sees_the_local_cloud(tmp_path, monkeypatch):
    """A profile fails every call; an endpoint of one service, or the word to ignore endpoints, leads off this machine."""
    foreign = ("AWS_PROFILE", "AWS_ENDPOINT_URL_S3", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "http_proxy", "ALL_PROXY")
    for name in foreign:
        monkeypatch.setenv(name, "foreign")
    state = {"fleet": 1, "endpoint": "http://127.0.0.1:9", "tier": "plain", "description": "", "reason": ""}
    local = Local(Places(tmp_path), state, None)
    tell = "import json, os; print(json.dumps(dict(os.environ)))"
    with local.popen([sys.executable, "-c", tell], stdout=subprocess.PIPE) as done:
        seen = json.loads(done.stdout.read())
    assert not [name for name in foreign if name in seen]
    assert seen["AWS_ENDPOINT_URL"] == "http://127.0.0.1:9"
    assert seen["HOME"] == os.environ["HOME"]
