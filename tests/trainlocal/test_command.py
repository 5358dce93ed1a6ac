"""`python -m trainlocal` where nothing runs."""

import subprocess
import sys

import pytest


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "trainlocal", *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_ending_what_does_not_run_is_no_error(tmp_path):
    answer = command("down", "--directory", str(tmp_path))
    assert answer.returncode == 0
    assert "there is nothing to end" in answer.stdout


@pytest.mark.parametrize("what", ["status", "env"])
def test_asking_what_does_not_run_is_an_error_that_says_how_to_start_it(tmp_path, what):
    answer = command(what, "--directory", str(tmp_path))
    assert answer.returncode == 1
    assert "python -m trainlocal up" in answer.stderr
    assert "Traceback" not in answer.stderr
