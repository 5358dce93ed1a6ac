"""The clock."""

from __future__ import annotations

import http.server
import threading
import time
from email.utils import formatdate

import pytest

from tests.trainrun.node.checks.conftest import said
from trainrun.node.checks.clock import check_clock, chrony_offset
from trainrun.node.outcome import StepFailed

UNSYNCHRONIZED = "00000000,,0,0.000000000,0.000000000,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised"


def test_chrony_is_asked_first(program):
    program("chronyc", said("chronyc-tracking.txt"))
    assert check_clock("http://127.0.0.1:9") == "the clock is -0.000012 s off (chrony)."


def test_a_clock_that_is_off_is_a_fault_with_what_to_do(program):
    program("chronyc", said("chronyc-tracking.txt").replace("-0.000012345", "901.5"))
    with pytest.raises(StepFailed, match=r"\+901.5 s off \(chrony\); at most 60 s .* 15 minutes .* Have chrony run"):
        check_clock("")


def test_a_second_is_told(program):
    program("chronyc", said("chronyc-tracking.txt").replace("-0.000012345", "2.5"))
    assert "Beware" in check_clock("")


def test_a_chrony_that_has_no_source_yet_says_nothing(program):
    program("chronyc", UNSYNCHRONIZED)
    assert chrony_offset() is None


@pytest.fixture
def server(no_programs):
    """server(seconds): a server whose clock is so far ahead of ours, and that refuses everything; its URL."""
    servers = []

    def start(ahead):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_HEAD(self):
                self.send_response(403)
                self.end_headers()

            def date_time_string(self, timestamp=None):
                return formatdate(time.time() + ahead, usegmt=True)

            def log_message(self, *_):
                pass

        servers.append(http.server.HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for one in servers:
        one.shutdown()
        one.server_close()


def test_without_chrony_s3s_time_is_taken(server):
    assert "off (the time that http://127.0.0.1:" in check_clock(server(0))
    with pytest.raises(StepFailed, match=r"The clock is -9\d\d\.\d s off"):
        check_clock(server(950))


def test_nothing_to_compare_with_is_told(no_programs):
    assert "was not compared" in check_clock("")
    assert "was not compared" in check_clock("http://127.0.0.1:9")
