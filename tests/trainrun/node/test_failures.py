"""Which failures are held against the job, and when they are the same."""

from __future__ import annotations

import pytest

from trainrun.last_error import LastError
from trainrun.node.failures import Failure, Repetition, failure_of


def failed(*errors, codes=(1,), explanation="", killed=False, step=7):
    return failure_of(step=step, errors=errors, codes=codes, explanation=explanation, killed_by_kernel=killed)


def error(kind, message, at=1.0, rank=0, number=0):
    return LastError(rank=rank, kinds=(*kind.split(" < "), "Exception"), number=number, message=message, time=at)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("ConfigError", "steps is -1."),
        ("ValueError", "shapes differ"),
        ("RuntimeError", "CUDA error: device-side assert triggered"),
    ],
)
def test_a_ranks_own_error_counts(kind, message):
    assert failed(error(kind, message)) == Failure(step=7, error=f"{kind}: {message}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("StoreError", "s3://bucket/x: no answer"),
        ("CheckpointError", "3 saves in a row failed"),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error"),
        ("RuntimeError", "[gloo] Connection closed by peer [10.0.0.3]:4242"),
        ("RuntimeError", "Timed out waiting 20000ms for recv operation to complete"),
        ("RuntimeError", "NCCL error: unhandled system error (run with NCCL_DEBUG=INFO)"),
        ("EndpointConnectionError < ConnectionError < BotoCoreError", "Could not connect to the endpoint URL"),
        ("SlowDown < ClientError", "An error occurred (SlowDown) when calling the PutObject operation"),
        ("BrokenPipeError < ConnectionError < OSError", "[Errno 32] Broken pipe"),
    ],
)
def test_what_comes_from_outside_does_not(kind, message):
    assert failed(error(kind, message)) is None


@pytest.mark.parametrize(("number", "counts"), [(5, False), (116, False), (28, False), (2, True), (13, True)])
def test_of_the_systems_errors_those_count_that_stay(number, counts):
    """EIO, ESTALE, ENOSPC; ENOENT, EACCES."""
    assert (failed(error("OSError", "x", number=number)) is not None) == counts


def test_an_abort_by_nccls_watchdog_is_a_lost_peer():
    said = "[PG 0 Rank 3] Process group watchdog thread terminated with exception: NCCL error: remote process exited"
    assert failed(codes=(-6,), explanation=said) is None
    assert failed(codes=(-6,), explanation="terminate called after throwing an instance of 'std::bad_alloc'") is not None


def test_the_first_error_is_the_one_that_counts():
    """The ranks beside it mostly fail because of it."""
    first, second = error("ValueError", "bad sample", rank=3), error("RuntimeError", "Connection closed by peer", at=2.0)
    assert failed(first, second) == Failure(step=7, error="ValueError: bad sample")


@pytest.mark.parametrize(
    ("codes", "killed", "counts"),
    [((-9,), False, False), ((-9,), True, True), ((-15, -15), False, False), ((-11,), False, True), ((-6, -15), False, True)],
)
def test_signals(codes, killed, counts):
    """SIGKILL comes from outside, also from a chaos drill; only where the kernel says so was it for memory."""
    assert (failed(codes=codes, killed=killed) is not None) == counts


@pytest.mark.parametrize(
    ("explanation", "expected"),
    [
        ("Traceback ...\n  File x\nModuleNotFoundError: No module named 'foo'\n", "ModuleNotFoundError: No module named 'foo'"),
        ("[rank3]: torch.OutOfMemoryError: CUDA out of memory.\nmore", "[rank3]: torch.OutOfMemoryError: CUDA out of memory."),
        ("./run.sh: line 3: nvcc: command not found\n", "./run.sh: line 3: nvcc: command not found"),
        ("torch.distributed.DistNetworkError: failed to recv, got 0 bytes", None),
        ("", "Exit codes [1], and nothing was said."),
    ],
)
def test_other_peoples_programs_are_known_by_what_they_say(explanation, expected):
    found = failed(explanation=explanation)
    assert (found and found.error) == expected


class TestRepetition:
    def test_numbers_do_not_make_a_difference_but_steps_do(self):
        repetition = Repetition(allowed=2)
        assert repetition.note(Failure(step=5, error="ValueError: tensor at 0x7f12 of 12 bytes")) == ""
        assert repetition.note(Failure(step=6, error="ValueError: tensor at 0x7f12 of 12 bytes")) == ""
        assert "2 times in the same way at step 6" in repetition.note(
            Failure(step=6, error="ValueError: tensor at 0xab of 1 bytes")
        )

    def test_another_error_begins_anew(self):
        repetition = Repetition(allowed=3)
        for name in ("A", "A", "B", "B"):
            assert repetition.note(Failure(step=5, error=name)) == ""
        assert "3 times" in repetition.note(Failure(step=5, error="B"))

    def test_a_failure_from_outside_in_between_changes_nothing(self):
        repetition = Repetition(allowed=2)
        assert repetition.note(Failure(step=0, error="A")) == ""
        assert repetition.note(None) == ""
        assert "before its first step was done" in repetition.note(Failure(step=0, error="A"))
