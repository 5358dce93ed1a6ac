"""How soon a cluster recovers from each fault, what it loses, and how long a node takes to its first step.

On the local fleet, from the template's real user data: two isolated nodes of this one machine, emulated AWS, gloo, a GPT of
20,000 parameters with a pause of 0.1 s in each step, a checkpoint every 10 steps. So it is our own part that is measured; EC2's,
a large model's and a GPU's come on top.

    .venv/bin/python benchmarks/recovery.py [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in (".", "constructs", "training", "local")]

from tests.end_to_end.faulted import Faulted, Recovery, faulted  # noqa: E402
from traincluster.command import main as traincluster  # noqa: E402
from trainrun.boot import PARTS, boots  # noqa: E402
from trainrun.store import open_store  # noqa: E402

Fault = Callable[[Faulted], Recovery]


def damaged_payload(cluster: Faulted) -> Recovery:
    """A node is lost while the code that its replacement fetches is damaged for 8 s."""
    damage = threading.Thread(target=traincluster, args=(["chaos", "corrupt-payload", "--yes", "--seconds", "8"],))
    damage.start()
    cluster.wait_for_damage()
    recovery = cluster.make("kill-node", node="other")
    damage.join()
    return recovery


RUNS: dict[str, dict[str, Fault]] = {
    "processes": {
        "kill a worker": lambda cluster: cluster.make("kill-worker"),
        "kill an agent": lambda cluster: cluster.make("kill-agent"),
        "SIGSTOP a rank for good (no_progress 8 s)": lambda cluster: cluster.make("stop-rank", seconds=0),
        "rebalance recommendation": lambda cluster: cluster.make("rebalance", interrupts=False),
        "metadata out of reach, 4 s": lambda cluster: cluster.make("metadata", seconds=4, interrupts=False),
        "disk full, 4 s": lambda cluster: cluster.make("fill-disk", seconds=4, interrupts=False),
    },
    "nodes": {
        "kill a node": lambda cluster: cluster.make("kill-node", node="other"),
        "kill the rendezvous host": lambda cluster: cluster.make("kill-host"),
        "kill all nodes": lambda cluster: cluster.make("kill-all"),
        "kill a node, payload damaged": damaged_payload,
    },
    "notices": {
        "spot notice": lambda cluster: cluster.make("spot-notice", seconds=60),
        "Auto Scaling ends a node (hook)": lambda cluster: cluster.make("terminate"),
        "scheduled event": lambda cluster: cluster.make("maintenance", seconds=0),
        "link cut, 12 s (collective timeout 15 s)": lambda cluster: cluster.make("cut-link", node="other", seconds=12),
    },
}


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="how often each fault is made; default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured there too")
    options = parser.parse_args()
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    rows: dict[str, list[Recovery]] = defaultdict(list)
    digests: dict[str, set[str]] = defaultdict(set)
    found_boots = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        with faulted(directory) as cluster:
            if cluster.tier == "plain":
                sys.exit(
                    "Plain nodes are processes on this machine: there is no node to lose. Run it where nodes can be isolated."
                )
            for number in range(options.rounds):
                cluster.start(f"undisturbed-{number}")
                found_boots += boots(open_store(cluster.cluster.location))
                digests["undisturbed"].add(cluster.finish())
                for run, faults in RUNS.items():
                    cluster.start(f"{run}-{number}")
                    for fault, make in faults.items():
                        rows[fault].append(make(cluster))
                        print(f"round {number + 1}: {fault}: {rows[fault][-1].training:.1f} s", file=sys.stderr, flush=True)
                        time.sleep(1.0)
                    digests[run].add(cluster.finish())
    print(f"Seconds, medians of {options.rounds} rounds (most); {os.cpu_count()} processors, their load before: {load:.1f}\n")
    print(f"{'fault':<44}{'heard':>16}{'training again':>16}{'of its boot':>16}{'steps lost':>12}")
    for fault, recoveries in rows.items():
        columns = [_cell([getattr(one, field) for one in recoveries]) for field in ("heard", "training", "after_boot")]
        lost = max(one.steps_lost for one in recoveries)
        print(f"{fault:<44}" + "".join(f"{cell:>16}" for cell in columns) + f"{lost:>12}")
    same = {run: digests[run] == digests["undisturbed"] and len(digests[run]) == 1 for run in RUNS}
    print(
        "\nThe same parameters, bit for bit, as undisturbed: "
        + ", ".join(f"{run} {'yes' if same[run] else 'NO'}" for run in RUNS)
    )
    print("\nFrom the first instruction of user data to the first training step, seconds")
    for part in (*PARTS, "start", "resume"):
        if seconds := [boot.parts[part] for boot in found_boots if part in boot.parts]:
            print(f"  {part:<12}{statistics.median(seconds):>8.2f}")
    print(f"  {'all':<12}{statistics.median(boot.seconds for boot in found_boots):>8.2f}")
    if options.json:
        measured = {fault: [asdict(one) for one in recoveries] for fault, recoveries in rows.items()}
        options.json.write_text(json.dumps({"faults": measured, "boots": [asdict(boot) for boot in found_boots], "same": same}))


def _cell(values: list[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{statistics.median(there):.1f} ({max(there):.1f})" if there else "-"


if __name__ == "__main__":
    main()
