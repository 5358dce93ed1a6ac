"""Keeps the agent running: a systemd unit where systemd runs, a detached supervisor of our own elsewhere."""

from __future__ import annotations

import fcntl
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from trainrun.node.outcome import DO_NOT_RESTART
from trainrun.node.places import Places
from trainrun.node.processes import adopt_orphans, kill_descendants
from trainrun.spec import RunSpec

UNIT = "trainrun.service"
RESTART_SECONDS = 1
"""Between two agents. It is part of what a killed agent costs, and keeps one that fails at once from asking AWS without end."""
PASSED_ON = ("AWS_", "TRAINCLUSTER_", "TRAINRUN_")
"""Prefixes of the variables that the agent takes over from the bootstrap."""
SYSTEMD_RUNS = Path("/run/systemd/system")


def start(places: Places) -> str:
    """Have the agent run from now on, and again after a reboot where systemd runs. May be called again.

    Returns:
        What keeps it running.

    Raises:
        OSError, subprocess.CalledProcessError: it could not be started.
        ConfigError: the RunSpec is not readable.
    """
    spec = RunSpec.from_json(places.spec.read_text(encoding="utf-8"))
    environment = passed_on(os.environ, places=places)
    _write_program(places, environment)
    if SYSTEMD_RUNS.is_dir() and not os.environ.get("TRAINCLUSTER_ROOT"):
        text = unit_text(python=sys.executable, environment=environment, stop_grace=spec.timeouts.stop_grace)
        _write_private(places.unit, text)
        for command in (["daemon-reload"], ["enable", UNIT], ["start", UNIT]):
            subprocess.run(["systemctl", *command], check=True)
        return UNIT
    places.logs.mkdir(parents=True, exist_ok=True)
    places.state.mkdir(parents=True, exist_ok=True)
    with (places.logs / "supervisor.log").open("ab") as log:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "trainrun.node", "supervise"],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    return f"supervisor {supervisor.pid}"


def _write_program(places: Places, environment: Mapping[str, str]) -> None:
    """A program for people, and for Systems Manager, with the Python and the variables of the agent."""
    variables = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(environment.items()))
    places.program.parent.mkdir(parents=True, exist_ok=True)
    text = f"#!/bin/sh\n# trainrun ...: its commands; trainrun --node ...: the agent's own\n{variables}"
    text += 'module=trainrun\n[ "${1:-}" != --node ] || { module=trainrun.node; shift; }\n'
    _write_private(places.program, f'{text}exec {shlex.quote(sys.executable)} -m "$module" "$@"\n')
    places.program.chmod(0o700)


def passed_on(environment: Mapping[str, str], *, places: Places) -> dict[str, str]:
    """The variables that the agent runs with: where its code is, and what the bootstrap was told about AWS."""
    passed = {name: value for name, value in sorted(environment.items()) if name.startswith(PASSED_ON)}
    return {**passed, "PYTHONPATH": str(places.payload)}


def unit_text(*, python: str, environment: Mapping[str, str], stop_grace: int) -> str:
    """The systemd unit. It starts after AWS's deep-learning images have mounted the instance store, which is then left to them.

    Args:
        python: the Python that runs the agent.
        environment: its variables.
        stop_grace: seconds that the ranks may take to save and leave.
    """
    variables = "\n".join(f'Environment="{name}={_escaped(value)}"' for name, value in sorted(environment.items()))
    return f"""[Unit]
Description=Training node agent
Wants=network-online.target
After=network-online.target dlami-nvme.service
StartLimitIntervalSec=0

[Service]
Type=simple
ExecStart={python} -m trainrun.node run
{variables}
Restart=on-failure
RestartSec={RESTART_SECONDS}
RestartPreventExitStatus={DO_NOT_RESTART}
KillMode=mixed
OOMPolicy=continue
TimeoutStopSec={stop_grace + 15}
LimitMEMLOCK=infinity
LimitNOFILE=1048576
TasksMax=infinity

[Install]
WantedBy=multi-user.target
"""


def supervise(places: Places) -> int:
    """Run the agent, and again whenever it fails, as the systemd unit does. One supervisor a node: a second one ends at once."""
    with (places.state / "supervisor.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        adopt_orphans()
        asked = threading.Event()
        while True:
            code = _run_agent(asked)
            kill_descendants(os.getpid())  # ranks of an agent that was killed
            if asked.is_set() or code in (0, DO_NOT_RESTART):
                return code
            time.sleep(RESTART_SECONDS)


def _run_agent(asked: threading.Event) -> int:
    """Run the agent once; a SIGTERM is passed on to it, and noted."""
    agent = subprocess.Popen([sys.executable, "-m", "trainrun.node", "run"])

    def forward(number: int, _: FrameType | None) -> None:
        asked.set()
        agent.send_signal(number)

    signal.signal(signal.SIGTERM, forward)
    return agent.wait()


def _write_private(path: Path, text: str) -> None:
    """The unit may hold credentials where the bootstrap was given any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(text, encoding="utf-8")


def _escaped(value: str) -> str:
    """A value inside a quoted systemd assignment; % starts a specifier there (systemd.unit(5), systemd.syntax(7))."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("\n", "\\n")
