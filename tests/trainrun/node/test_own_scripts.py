"""What a script of the user's own, and what trainrun's loop, get of a notice through the agent: file, signal, and their end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from trainrun.node.mpi_rank import VARIABLE, RankOrder
from trainrun.node.processes import descendants, ranks_below
from trainrun.spec_cluster import nodes_save

SPOT = "drills/spot/instance-action"
REBALANCE = "drills/events/recommendations/rebalance"

WITH_HANDLER = '''
"""Plain torch: it saves at a signal or for a file, and ends with 75. A rank's helper must get no signal."""
import os, pathlib, signal, subprocess, sys, time
import torch, torch.distributed as dist

shared, state = pathlib.Path(sys.argv[1]), pathlib.Path(os.environ["TRAINRUN_STATE"])
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
helper = subprocess.Popen(["sleep", "600"])
dist.init_process_group("gloo")
rank, step, saved = dist.get_rank(), 0, 0.0
while True:
    step += 1
    wish = state / "save"
    wished = wish.stat().st_mtime if wish.exists() else 0.0
    flags = torch.tensor([float(bool(asked)), wished], dtype=torch.float64)
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    if flags[0] or flags[1] > saved:
        (shared / f"saved-{rank}-{step}").write_text(f"{len(asked)} {(state / 'stop').exists()} {helper.poll()}")
        saved = float(flags[1])
    if flags[0]:
        time.sleep(0.3)  # a second signal would come now
        (shared / f"left-{rank}").write_text(f"{len(asked)} {(state / 'stop').exists()} {helper.poll()}")
        helper.kill()
        sys.exit(75)
    (shared / f"step-{rank}").write_text(str(step))
    time.sleep(0.02)
'''

DEAF = '''
"""It hears nothing, and would train for ever."""
import os, pathlib, signal, sys, time
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
pathlib.Path(sys.argv[1], f"step-{os.environ['RANK']}").write_text("1")
time.sleep(600)
'''


def node_of(cluster: Any) -> Any:
    (node,) = cluster.nodes.values()
    return node


def put(cluster: Any, name: str, text: str) -> None:
    """Put a file into the node's state folder, whole."""
    path = node_of(cluster).root / "var/lib/traincluster" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name("new").write_text(text)
    path.with_name("new").replace(path)


def wait_for_files(cluster: Any, pattern: str, count: int, *, seconds: float = 60.0) -> list[Path]:
    cluster.wait(f"{count} of {pattern}", lambda: len(list(cluster.shared.glob(pattern))) >= count, seconds=seconds)
    return sorted(cluster.shared.glob(pattern))


@pytest.fixture
def one_node(start_cluster: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a group of one node with two ranks."""
    return lambda **fields: start_cluster(nodes=1, **{"cluster": {"processes_per_node": 2}, **fields})


def spot(seconds: float) -> str:
    return json.dumps({"action": "terminate", "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))})


def health(group: Any) -> str:
    return str(group.describe()["Instances"][0]["HealthStatus"])


def test_a_script_with_a_handler_saves_when_it_is_asked_and_leaves_with_75(one_node: Callable[..., Any], group: Any) -> None:
    cluster = one_node(script=WITH_HANDLER, job={"stop_signal": "SIGUSR1"})
    wait_for_files(cluster, "step-*", 2)
    put(cluster, REBALANCE, '{"noticeTime": "2026-11-30T12:00:00Z"}')
    first = wait_for_files(cluster, "saved-*", 2)
    assert {path.read_text() for path in first} == {"0 False None"}  # no signal, and it trains on

    put(cluster, SPOT, spot(120))
    assert node_of(cluster).process.wait(timeout=60) == 0, node_of(cluster).log()
    left = wait_for_files(cluster, "left-*", 2, seconds=1)
    assert {path.read_text() for path in left} == {"1 True None"}  # one signal each, the file, and none to the helper
    assert len({path.name.split("-")[2] for path in cluster.shared.glob("saved-*")}) == 2  # one save each time, at one step
    assert health(group) == "Unhealthy"
    details = [event["detail"] for event in node_of(cluster).events() if event["step"] == "watch"]
    assert [detail.split(" ")[0] for detail in details] == ["Rebalance", "Spot"]
    assert not [event for event in node_of(cluster).events() if event["state"] == "failed"]


def test_a_script_that_ignores_everything_is_killed_in_time(one_node: Callable[..., Any], group: Any) -> None:
    cluster = one_node(script=DEAF, job={"stop_signal": "SIGTERM"}, stop_grace=2)
    wait_for_files(cluster, "step-*", 2)
    ranks = [pid for pid in descendants(node_of(cluster).process.pid) if ranks_below(node_of(cluster).process.pid)]
    asked = time.monotonic()
    put(cluster, SPOT, spot(120))
    assert node_of(cluster).process.wait(timeout=60) == 0, node_of(cluster).log()
    print(f"\ndeaf ranks are gone {time.monotonic() - asked:.1f} s after the notice")
    assert time.monotonic() - asked < 2 + 10 + 5
    assert ranks
    for pid in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert health(group) == "Unhealthy"


def test_ela_03_one_rank_of_trainruns_loop_is_asked_and_all_stop_at_the_same_step_through_the_agent(
    one_node: Callable[..., Any], group: Any, dataset: str
) -> None:
    """SIGTERM to one rank: all save that step, and the node trains on from it. Then a rebalance recommendation, then the end."""
    configuration = {
        **{"data": dataset, "sequence_length": 16, "batch_tokens": 64, "steps": 100_000, "log_every": 10, "strategy": "ddp"},
        **{"model": {"layers": 1, "width": 16, "heads": 2}, "checkpoint": {"every_steps": 90_000}},
    }
    cluster = one_node(job={"entry_point": "trainrun.pretrain", "arguments": (), "configuration": configuration})
    node = node_of(cluster)

    def commits() -> list[int]:
        return sorted(int(key.split("/")[0].removeprefix("step-")) for key in cluster.objects("step-") if "COMMIT" in key)

    def events(name: str) -> list[int]:
        lines = [
            line
            for path in sorted((node.root / "var/lib/traincluster/metrics").glob("*"))
            for line in path.read_text().splitlines()
        ]
        return [entry["step"] for entry in map(json.loads, lines) if entry.get("event") == name]

    def launches() -> int:
        return sum(event["step"] == "train" and event["state"] == "started" for event in node.events())

    cluster.wait("training", lambda: bool(events("started")), seconds=60)
    time.sleep(1)
    ranks = ranks_below(node.process.pid)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGTERM)
    cluster.wait("a checkpoint", lambda: len(commits()) == 1, seconds=30)
    cluster.wait("another launch", lambda: len(events("started")) == 2, seconds=60)
    assert events("stopping") == commits() == events("started")[1:]  # saved where it stopped, and goes on from there

    cluster.wait("steps", lambda: launches() == 2, seconds=10)
    time.sleep(1)
    put(cluster, REBALANCE, '{"noticeTime": "2026-11-30T12:00:00Z"}')
    cluster.wait("a checkpoint on request", lambda: len(commits()) == 2, seconds=30)
    assert events("save_requested") == commits()[1:]
    assert (launches(), health(group)) == (2, "Healthy")

    put(cluster, SPOT, spot(120))
    assert node.process.wait(timeout=60) == 0, node.log()
    assert commits()[2:] == events("stopping")[1:]
    assert health(group) == "Unhealthy"


def test_a_capacity_block_that_ends_has_the_run_save_and_stop_and_nobody_replaced(
    one_node: Callable[..., Any], group: Any
) -> None:
    saves_in = timedelta(seconds=12)
    ends = datetime.now(timezone.utc) + saves_in
    ends += datetime(2000, 1, 1, tzinfo=timezone.utc) - nodes_save(
        datetime(2000, 1, 1, tzinfo=timezone.utc), instance_type="c7i.large", stop_grace=15
    )
    cluster = one_node(cluster={"capacity_ends": ends.isoformat()}, job={"stop_signal": "SIGTERM"})
    cluster.wait("training", lambda: bool(cluster.trace()), seconds=60)
    node = node_of(cluster)
    assert node.process.wait(timeout=60) == 0, node.log()
    result = json.loads(cluster.objects("result.json")["result.json"])
    assert result["state"] == "stopped"
    assert result["reason"].startswith("It saved and stopped: the Capacity Block ends at ")
    assert group.describe()["DesiredCapacity"] == 0
    assert int((cluster.shared / "saved").read_text()) == max(entry["step"] for entry in cluster.trace())
    assert [event["state"] for event in node.events() if event["step"] == "finish"] == ["started", "done"]


def test_a_notice_while_the_nodes_meet_ends_the_wait(one_node: Callable[..., Any], group: Any) -> None:
    cluster = one_node(cluster={"nodes_min": 2})
    node = node_of(cluster)
    cluster.wait("the node waits", lambda: any(event["step"] == "meet" for event in node.events()), seconds=60)
    put(cluster, SPOT, spot(120))
    assert node.process.wait(timeout=30) == 0, node.log()
    assert health(group) == "Unhealthy"
    assert not [event for event in node.events() if event["step"] == "train" or event["state"] == "failed"]


def test_under_mpirun_the_program_is_the_rank_and_not_what_started_it(tmp_path: Path) -> None:
    program = "import pathlib, signal, subprocess, sys\n" + (
        "signal.signal(signal.SIGUSR1, lambda *_: pathlib.Path('heard').write_text('1'))\n"
        "subprocess.Popen(['sleep', '60'])\npathlib.Path('ready').touch()\nsignal.pause()\n"
    )
    order = RankOrder(command=[sys.executable, "-c", program], working_directory=str(tmp_path), folder=str(tmp_path))
    names = {"RANK": "1", "SIZE": "2", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
    environment = {**os.environ, VARIABLE: order.to_text(), **{f"OMPI_COMM_WORLD_{name}": n for name, n in names.items()}}
    wrapper = subprocess.Popen([sys.executable, "-m", "trainrun.node.mpi_rank"], env=environment)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "ready").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        below = ranks_below(os.getpid())
        assert below == descendants(wrapper.pid)[:1]
        os.kill(below[0], signal.SIGUSR1)
        assert wrapper.wait(timeout=20) == 0
        assert (tmp_path / "heard").exists()
    finally:
        for pid in [*descendants(wrapper.pid), *descendants(os.getpid())]:
            if Path(f"/proc/{pid}/comm").exists() and Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
                os.kill(pid, signal.SIGKILL)
        wrapper.kill()
        wrapper.wait()
