"""A demo that is interrupted, at whatever phase and however, leaves nothing behind but its logs."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.isolation import ROOT
from tests.leftovers import assert_nothing_is_left, namespaces, processes

pytestmark = pytest.mark.slow

PHASES = {
    "while cdk bootstraps": "... cdk bootstrap",
    "while cdk deploys": "tokenizing the Python standard library",
    "while nodes boot": "boot from the launch template",
    "while the ranks train": "loss ",
}


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        ("while cdk bootstraps", signal.SIGKILL),
        ("while cdk deploys", signal.SIGINT),
        ("while cdk deploys", signal.SIGKILL),
        ("while nodes boot", signal.SIGINT),
        ("while the ranks train", signal.SIGKILL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else value.replace(" ", "-"),
)
def test_nothing_is_left_of_an_interrupted_demo(tmp_path, phase, number):
    with subprocess.Popen(
        [sys.executable, "-u", "-m", "demo", "--build", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        try:
            said = read_until(demo, PHASES[phase])
            time.sleep(0.3)
            directory = tmp_path / "local"
            those = namespaces(processes(directory))
            os.kill(demo.pid, number)
            demo.wait(40)
            said += demo.stdout.read()
        finally:
            demo.kill()
    assert "Traceback" not in said
    assert number == signal.SIGKILL or "Interrupted. Everything that was started has been ended." in said
    assert_nothing_is_left(directory, those)
    assert not processes(tmp_path), "a command of the demo goes on"


def read_until(process, wanted):
    said = ""
    for line in process.stdout:
        said += line
        if wanted in line:
            return said
    raise AssertionError(f"the demo ended before it said {wanted!r}:\n{said}")
