"""Running checks at once."""

from __future__ import annotations

import threading
import time

from trainrun.node.checks.runner import Check, Checked, ChecksFailed, run_checks
from trainrun.node.outcome import StepFailed


def test_they_run_at_once_and_are_told_in_order():
    gate = threading.Barrier(3, timeout=5)  # none goes on before all are there

    def look(name):
        gate.wait()
        return f"{name} is well"

    results = run_checks([Check(name, lambda name=name: look(name)) for name in "abc"])
    assert [(one.name, one.found, one.fault) for one in results] == [(n, f"{n} is well", "") for n in "abc"]
    assert all(one.seconds < 5 for one in results)


def test_all_faults_are_told_with_the_checks_name():
    def fail(text):
        raise StepFailed(text)

    results = run_checks([Check("one", lambda: fail("wrong")), Check("two", lambda: "well"), Check("three", lambda: fail("too"))])
    assert str(ChecksFailed(results)) == "one: wrong\nthree: too"


def test_a_check_with_a_fault_of_its_own_is_no_sound_node():
    (result,) = run_checks([Check("odd", lambda: str(1 // 0))])
    assert result.fault == "The check itself failed: ZeroDivisionError: integer division or modulo by zero"


def test_what_hangs_fails_and_keeps_nobody():
    over = threading.Event()
    started = time.monotonic()
    results = run_checks([Check("mount", lambda: str(over.wait(30))), Check("clock", lambda: "well")], longest=0.3)
    over.set()
    assert time.monotonic() - started < 5
    assert "has not ended after 0.3 s" in results[0].fault and not results[1].fault


def test_how_one_is_told():
    assert str(Checked(name="store", seconds=0.125, found="can be written")) == "store 0.12 s: can be written"
