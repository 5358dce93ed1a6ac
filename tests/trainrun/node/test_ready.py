"""What a node tells CloudFormation."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import boto3
import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from trainrun.config import ConfigError
from trainrun.node.ready import Readiness, shortened
from trainrun.spec import ReadinessSpec

NODE = "i-0123456789abcdef0"


class FakeFormation:
    """Takes signals, or raises what it is told to."""

    def __init__(self, *faults):
        self.faults, self.signals = list(faults), []

    def signal_resource(self, **request):
        if self.faults:
            raise self.faults.pop(0)
        self.signals.append(request)


@pytest.fixture
def formation(monkeypatch):
    def make(*faults):
        fake = FakeFormation(*faults)
        monkeypatch.setattr(boto3.session.Session, "client", lambda *_, **__: fake)
        spec = ReadinessSpec(way="signal", stack="Stack", resource="Nodes")
        return fake, Readiness(spec, node=NODE, region="us-east-1", pause=lambda _: None)

    return make


class TestSignal:
    def test_success_and_failure_have_the_node_and_the_step_in_their_id(self, formation):
        fake, ready = formation()
        assert ready.passed() == f"the stack Stack was sent SUCCESS as {NODE}"
        ready.failed("check", "no torch")
        ready.failed("x" * 80, "no torch")
        ids = [one["UniqueId"] for one in fake.signals]
        assert ids[:2] == [NODE, f"{NODE}/check"] and len(ids[2]) == 64
        assert [one["Status"] for one in fake.signals] == ["SUCCESS", "FAILURE", "FAILURE"]
        assert fake.signals[0] | {"StackName": "Stack", "LogicalResourceId": "Nodes"} == fake.signals[0]

    def test_a_service_that_is_away_for_a_moment_is_asked_again_and_then_left(self, formation):
        away = EndpointConnectionError(endpoint_url="x")
        fake, ready = formation(away, away)
        assert "SUCCESS" in ready.passed() and len(fake.signals) == 1
        _, ready = formation(away, away, away)
        assert ready.passed().startswith("CloudFormation did not take this node's word in 3 attempts (EndpointConnectionError")

    def test_a_stack_that_waits_no_more_is_no_problem(self, formation):
        over = ClientError({"Error": {"Code": "ValidationError", "Message": "can not be signaled"}}, "SignalResource")
        _, ready = formation(over)
        assert ready.passed() == "the stack Stack waits for no signal (any more)"


class TestWaitCondition:
    @pytest.fixture
    def handle(self):
        """A URL that takes signals as S3 does; what it took, and the statuses that it answers with."""
        taken, statuses = [], []

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                taken.append((self.headers.get("Content-Type"), json.loads(body)))
                self.send_response(statuses.pop(0) if statuses else 200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/handle?X-Amz-Signature=x", taken, statuses
        server.shutdown()
        server.server_close()

    def ready(self, url):
        spec = ReadinessSpec(way="wait_condition", url=url)
        return Readiness(spec, node=NODE, region="us-east-1", pause=lambda _: None)

    def test_the_reason_travels_in_full_and_without_a_content_type(self, handle):
        url, taken, _ = handle
        assert self.ready(url).passed() == "the stack's wait condition was sent SUCCESS"
        self.ready(url).failed("check", "torch cannot be imported.\nInstall it.")
        assert [kind for kind, _ in taken] == ["", ""]
        assert taken[1][1] == {
            "Status": "FAILURE",
            "UniqueId": NODE,
            "Reason": "check: torch cannot be imported. Install it.",
            "Data": "check",
        }

    def test_errors_are_tried_again_and_an_old_url_is_not(self, handle):
        url, taken, statuses = handle
        statuses += [500, 503]
        assert self.ready(url).passed().endswith("SUCCESS") and len(taken) == 3
        statuses += [403]
        assert self.ready(url).passed() == "the stack's wait condition takes no word (any more)"


def test_by_default_nobody_is_told():
    ready = Readiness(ReadinessSpec(), node=NODE, region="us-east-1")
    assert not ready.is_awaited and ready.passed() == ready.failed("check", "x") == ""


def test_a_long_reason_is_cut():
    assert shortened("a  b\nc", 10) == "a b c" and len(shortened("x" * 50, 10)) == 10


@pytest.mark.parametrize("fields", [{"way": "signal"}, {"way": "none", "url": "x"}, {"way": "wait_condition", "stack": "x"}])
def test_a_way_without_what_it_takes_is_refused(fields):
    with pytest.raises(ConfigError, match="way is "):
        ReadinessSpec(**fields)
