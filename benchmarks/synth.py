"""How long `cdk synth` of the reference stacks takes, against an app with nothing in it.

Both run in turns on the same machine with the real CLI, after one run of each that is not counted. The goal is a median ratio
of 1.5 or less. An empty app's time is the floor: it is Node, jsii and aws-cdk-lib starting.

    python benchmarks/synth.py --runs 7 --json build/synth.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from trainlocal.environment import cdk_environment, cloud_environment

ROOT = Path(__file__).resolve().parent.parent
CDK = Path(sys.prefix) / "bin" / "cdk"
GOAL = 1.5
NOWHERE = "http://127.0.0.1:9"
"""Neither app looks anything up; if one did, it would fail here at once."""

EMPTY_APP = """
import aws_cdk as cdk

app = cdk.App()
cdk.CfnWaitConditionHandle(cdk.Stack(app, "Empty"), "Nothing")  # a template without a resource is refused
app.synth()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=7, help="counted runs of each app (default: 7)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder, "empty")
        empty.mkdir()
        (empty / "app.py").write_text(EMPTY_APP)
        (empty / "cdk.json").write_text((ROOT / "cdk.json").read_text())
        apps = {"empty app": empty, "reference stacks": ROOT}
        environment = {**os.environ, **cloud_environment(NOWHERE), **cdk_environment(Path(folder, "home"))}
        seconds: dict[str, list[float]] = {name: [] for name in apps}
        for number in range(options.runs + 1):
            for name, directory in apps.items():
                took = synth(directory, Path(folder, "out"), environment)
                if number > 0:
                    seconds[name].append(took)
    ratios = [full / floor for full, floor in zip(seconds["reference stacks"], seconds["empty app"], strict=True)]
    ratio = statistics.median(ratios)
    print_table(seconds, ratios)
    if options.json:
        result = {"seconds": seconds, "ratios": ratios, "median_ratio": ratio, "goal": GOAL}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def synth(directory: Path, out: Path, environment: dict[str, str]) -> float:
    """Seconds that one `cdk synth` takes."""
    start = time.perf_counter()
    done = subprocess.run(
        [str(CDK), "synth", "--quiet", "--output", str(out)], cwd=directory, env=environment, capture_output=True, text=True
    )
    took = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"cdk synth in {directory} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return took


def print_table(seconds: dict[str, list[float]], ratios: list[float]) -> None:
    print(f"{'':<18}{'median s':>10}{'least s':>10}{'most s':>10}")
    for name, values in seconds.items():
        print(f"{name:<18}{statistics.median(values):>10.2f}{min(values):>10.2f}{max(values):>10.2f}")
    print(f"{'ratio':<18}{statistics.median(ratios):>10.2f}{min(ratios):>10.2f}{max(ratios):>10.2f}    (goal: {GOAL} or less)")


if __name__ == "__main__":
    main()
