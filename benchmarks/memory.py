"""Peak memory of a rank in each strategy, against ddp and against what theory says (`trainrun.memory`).

A GPT of about 100 million parameters trains for a few steps on four processes, one strategy after the other. What is measured is
the resident memory of a process at its highest during the steps after the first, less what it had before the model was made, in
the rank that had most. The columns of theory are states alone: activations, and what is gathered for the moment, come on top.

    python benchmarks/memory.py --json build/memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: F401 - before the first measurement, as part of what a process is without a model
import torch

import trainrun
from trainrun.data.write import find_documents, write_dataset
from trainrun.memory import model_states
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled

STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
RANKS = 4
STEPS = 3
SETTINGS = (
    *("--model.layers=14", "--model.width=768", "--model.heads=12"),
    *("--sequence_length=16", f"--batch_tokens={RANKS * 16}", "--micro_batch=1", f"--steps={STEPS}"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="default: bf16")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--strategy", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options.strategy, options.precision)
        return
    results: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text").write_bytes(random.Random(0).randbytes(100_000))
        write_dataset(find_documents([f"{folder}/text"]), f"{folder}/dataset", held_out=0)
        for strategy in STRATEGIES:
            results[strategy] = measure(strategy, options.precision, Path(folder))
    print_table(results, options.precision)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"precision": options.precision, "ranks": RANKS, "results": results}, indent=1) + "\n")


def measure(strategy: str, precision: Any, folder: Path) -> dict[str, float]:
    """Bytes a parameter, measured and by theory."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    command += [f"--worker={folder}", f"--strategy={strategy}", f"--precision={precision}"]
    # The allocator would keep what was freed (the model as it was made, 2 to 3 bytes a parameter), and it would count.
    own = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **own})
    if done.returncode:
        sys.exit(f"{strategy} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    ranks = [json.loads(Path(folder, f"{strategy}-{rank}.json").read_text()) for rank in range(RANKS)]
    parameters = ranks[0]["parameters"]
    theory = model_states(strategy, parameters, ranks=RANKS, precision=precision).device  # type: ignore[arg-type]
    return {
        "parameters": parameters,
        "peak_bytes": max(rank["peak"] for rank in ranks),
        "bytes_per_parameter": max(rank["peak"] for rank in ranks) / parameters,
        "theory_bytes_per_parameter": theory / parameters,
    }


def work(folder: Path, strategy: str, precision: str) -> None:
    """One rank."""
    run = trainrun.start(arguments=[*SETTINGS, f"--data={folder}/dataset", f"--strategy={strategy}", f"--precision={precision}"])
    data = run.tokens()
    torch.ones(64, 64, requires_grad=True).matmul(torch.ones(64, 64)).sum().backward()  # what torch allocates for itself
    before = resident("VmRSS")
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    parameters = sum(parameter.numel() for parameter in gpt.parameters())
    model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    del gpt
    for step in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        if step == 1:  # making the model and the optimizer's state is over
            Path("/proc/self/clear_refs").write_text("5")
    peak = resident("VmHWM") - before
    (folder / f"{strategy}-{run.ranks.rank}.json").write_text(json.dumps({"parameters": parameters, "peak": peak}))


def resident(field: str) -> int:
    """Bytes: VmRSS now, VmHWM at its highest since it was reset (proc(5))."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found[1])


def print_table(results: dict[str, dict[str, float]], precision: str) -> None:
    ddp = results["ddp"]
    print(f"{ddp['parameters'] / 1e6:.0f} M parameters, {RANKS} ranks, {precision}; bytes a parameter and rank")
    print(f"{'':<8}{'measured':>10}{'states':>10}{'of ddp':>10}{'in theory':>10}")
    for name, result in results.items():
        share = result["bytes_per_parameter"] / ddp["bytes_per_parameter"]
        theory = result["theory_bytes_per_parameter"] / ddp["theory_bytes_per_parameter"]
        print(
            f"{name:<8}{result['bytes_per_parameter']:>10.1f}{result['theory_bytes_per_parameter']:>10.1f}"
            f"{share:>10.2f}{theory:>10.2f}"
        )


if __name__ == "__main__":
    main()
