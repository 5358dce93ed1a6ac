"""How fast the accelerators of this node sum a tensor over all of them: the all-reduce on which training waits.

Measured by nccl-tests where the image has them, else by torch (`allreduce_program`). Both tell the bus bandwidth: what each
rank's links carry, 2 (n - 1) / n x bytes / time, which does not depend on the number of ranks n (nccl-tests, PERFORMANCE.md).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from trainrun.node.checks import allreduce_program
from trainrun.node.outcome import StepFailed
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec

BYTES = 1024**3
PUBLISHED = {("p4de.24xlarge", 2): 76.8, ("p5.48xlarge", 2): 437.0}
"""Bus bandwidth of 1 GiB in GB/s, by type and number of nodes (awsome-distributed-ai, micro-benchmarks/nccl-tests/README). There
is none for a single node, nor for other types: what they reach is told, and not judged."""
TOLERANCE = 0.2
"""How far below a published figure still passes: it was reached on other nodes, on another day, with other versions."""
SECONDS = 300.0
PROGRAM = "all_reduce_perf"
FOLDERS = ("/usr/local/cuda*/efa/test-cuda*", "/opt/nccl-tests/build", "/usr/local/bin")
"""Where AWS's images, and those of its samples, have nccl-tests."""


def check_bandwidth(
    software: Software, cluster: ClusterSpec, *, size: int = BYTES, published: float | None = None, nodes: int = 1
) -> str:
    """Measure on this node alone, over NVLink or whatever connects its accelerators.

    Args:
        software: what the job runs with.
        cluster: what the node is.
        size: bytes of the tensor.
        published: what the type is known to reach, in GB/s; None looks it up.
        nodes: how many nodes take part.

    Raises:
        StepFailed: it cannot be measured, or is too slow.
    """
    seen, source = measure(software, ranks=cluster.accelerators_per_node, size=size)
    if published is None:
        published = PUBLISHED.get((cluster.instance_type, nodes))
    return judge(seen, published=published, source=source)


def judge(seen: float, *, published: float | None, source: str) -> str:
    """Compare what was measured with what is known.

    Args:
        seen: bus bandwidth in GB/s.
        published: what the type is known to reach; None when nobody has published it.
        source: what measured.

    Raises:
        StepFailed: it is too slow.
    """
    if published is None:
        return f"all-reduce at {seen:.1f} GB/s of bus bandwidth ({source}; no figure is published to judge it by)"
    least = published * (1 - TOLERANCE)
    if seen < least:
        raise StepFailed(
            f"The all-reduce reaches {seen:.1f} GB/s of bus bandwidth ({source}), and {least:.1f} are expected: {published:g} "
            f"are published, {TOLERANCE:.0%} less still pass. See NCCL_DEBUG=INFO for a link, an EFA interface or the plugin "
            "aws-ofi-nccl that is not used; replace the instance if another one of the type is faster."
        )
    return f"all-reduce at {seen:.1f} GB/s of bus bandwidth ({source}), {published:g} are published"


def measure(software: Software, *, ranks: int, size: int, backend: str = "nccl") -> tuple[float, str]:
    """Measure with one process on this node. Returns GB/s, and what measured.

    Raises:
        StepFailed: it failed, or did not end in time.
    """
    if backend == "nccl" and software.sees_node and (program := find_nccl_tests()):
        text = _output(software, [str(program), "-b", str(size), "-e", str(size), "-g", str(ranks), "-n", "20"])
        return bus_bandwidth(text), str(program)
    source = Path(allreduce_program.__file__).read_text(encoding="utf-8")
    text = _output(software, [software.python, "-c", source, backend, str(ranks), str(size)])
    found = json.loads(text.splitlines()[-1])
    if not found["right"]:
        raise StepFailed(
            "A sum over this node's accelerators is wrong. Replace the instance: they or their links do not compute."
        )
    return float(found["bus_gb_per_second"]), f"torch, {backend}"


def find_nccl_tests(*, root: Path = Path("/"), folders: Sequence[str] = FOLDERS) -> Path | None:
    """nccl-tests' all-reduce, if the image has it; of several CUDA versions' the newest."""
    found = [path for folder in folders for path in root.glob(f"{folder.lstrip('/')}/{PROGRAM}")]
    return max(found, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path))], default=None)


def bus_bandwidth(text: str) -> float:
    """The bus bandwidth that all_reduce_perf prints last, in GB/s.

    Raises:
        StepFailed: it prints none, or wrong sums.
    """
    wrong = re.search(r"# Out of bounds values : (\d+) (\w+)", text)
    if wrong and wrong[2] != "OK":
        raise StepFailed(f"{PROGRAM} found {wrong[1]} wrong sums. Replace the instance: its GPUs or their links do not compute.")
    average = re.search(r"# Avg bus bandwidth\s*: ([\d.]+)", text)
    if average is None:
        raise StepFailed(f"{PROGRAM} printed no bandwidth:\n{text[-500:]}")
    return float(average[1])


def _output(software: Software, argv: Sequence[str]) -> str:
    environment = software.environment(os.environ)
    command = software.command(argv, environment)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        text = f"it did not end within {SECONDS:g} s" if isinstance(error, subprocess.TimeoutExpired) else error
        raise StepFailed(f"The all-reduce could not be measured: {text}. Is a link between the accelerators down?") from None
    if done.returncode:
        lines = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise StepFailed(f"The all-reduce could not be measured (status {done.returncode}):\n{lines}")
    return done.stdout
