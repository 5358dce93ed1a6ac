"""What the training loop itself costs: trainrun, Accelerate, Lightning Fabric and DeepSpeed's engine, each against the same
loop by hand.

All train the same GPT with the same AdamW, clipping, schedule, accumulation and a printed line a step, in one process, one
step of each in turn (in an order that is drawn anew each round). A ratio is a contender's step over the step by hand of the
same round; the median over the rounds is what counts. The goal for trainrun is 1.01 or less, and below every peer.

With --ranks 2 each of two processes does the same over gloo, where the one by hand uses DistributedDataParallel.

    python benchmarks/loop.py --rounds 200 --json build/loop.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import accelerate
import deepspeed
import lightning_fabric
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import trainrun
from trainrun.data.batch import Batch
from trainrun.data.dataset import TRAIN, open_dataset
from trainrun.data.write import find_documents, write_dataset
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw, schedule
from trainrun.settings import ModelSettings, OptimizerSettings

GOAL = 1.01
SIZES = {
    "small": (ModelSettings(layers=2, width=64, heads=2), 64),
    "medium": (ModelSettings(layers=4, width=256, heads=4), 128),
}
"""Model and sequence length."""
MICRO_BATCH, ACCUMULATION = 4, 2
OPTIMIZER = OptimizerSettings()


class Workload:
    """What every contender is given."""

    def __init__(self, size: str, steps: int, folder: Path, rank: int, world: int) -> None:
        self.settings, self.length = SIZES[size]
        self.steps, self.folder, self.rank, self.world = steps, folder, rank, world
        dataset = open_dataset(str(folder / "dataset"))
        self.tokens, self.vocabulary = dataset.tokens(TRAIN), dataset.description.vocabulary
        self.order = np.random.default_rng(0).permutation((len(self.tokens) - 1) // self.length)

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.settings, vocabulary=self.vocabulary, context=self.length)

    def batches(self, step: int) -> Iterator[Batch]:
        """The micro-batches of a step, as anyone would read them from a mapped file."""
        share = MICRO_BATCH * ACCUMULATION
        first = (step * self.world + self.rank) * share
        for start in range(first, first + share, MICRO_BATCH):
            chosen = self.order[np.arange(start, start + MICRO_BATCH) % len(self.order)] * self.length
            taken = torch.from_numpy(self.tokens[chosen[:, None] + np.arange(self.length + 1)].astype(np.int64))
            yield Batch(inputs=taken[:, :-1], targets=taken[:, 1:])

    def rate(self, step: int) -> float:
        return OPTIMIZER.learning_rate * schedule(step + 1, steps=self.steps, settings=OPTIMIZER)

    def mean_loss(self, loss: Tensor) -> Tensor:
        """From the sum over a micro-batch to its part of the step's mean."""
        return loss / (MICRO_BATCH * self.length * ACCUMULATION)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def line(step: int, loss: Tensor, norm: Any) -> None:
    print(f"step {step} loss {float(loss):.4f} norm {float(norm):.3f}", flush=True)


class Loss(nn.Module):
    """The model's loss as a forward, which is what wrappers wrap."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        return self.model.loss(batch)


def by_hand(work: Workload) -> Iterator[None]:
    gpt = work.model()
    optimizer = adamw(gpt, OPTIMIZER)
    model: nn.Module = Loss(gpt)
    if work.world > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    for step in range(work.steps):
        total = torch.zeros(())
        for number, batch in enumerate(work.batches(step), start=1):
            last = number == ACCUMULATION
            waits = contextlib.nullcontext() if last or work.world == 1 else model.no_sync()  # type: ignore[operator]
            with waits:
                loss = work.mean_loss(model(batch))
                loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(gpt.parameters(), OPTIMIZER.clip_norm)
        set_rate(optimizer, work.rate(step))
        optimizer.step()
        optimizer.zero_grad()
        if work.world > 1:
            dist.all_reduce(total, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
        line(step, total, norm)
        yield


def with_trainrun(work: Workload) -> Iterator[None]:
    shape = work.settings
    run = trainrun.start(
        arguments=[
            *(f"--data={work.folder / 'dataset'}", f"--steps={work.steps}", f"--sequence_length={work.length}"),
            *(f"--batch_tokens={work.world * MICRO_BATCH * ACCUMULATION * work.length}", f"--micro_batch={MICRO_BATCH}"),
            *(f"--model.layers={shape.layers}", f"--model.width={shape.width}", f"--model.heads={shape.heads}"),
            "--strategy=ddp",
        ]
    )
    data = run.tokens()
    gpt = work.model()
    model, optimizer = run.prepare(gpt, adamw(gpt, OPTIMIZER))
    state = run.state(model=model, optimizer=optimizer, data=data)
    state.resume()
    for _ in run.steps():
        for batch in data.micro_batches():
            run.backward(model.loss(batch))
        run.step(optimizer)
        state.save()
        yield


def with_accelerate(work: Workload) -> Iterator[None]:
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    gpt = work.model()
    optimizer: Any = adamw(gpt, OPTIMIZER)
    model, optimizer = accelerator.prepare(Loss(gpt), optimizer)
    for step in range(work.steps):
        total = torch.zeros(())
        for batch in work.batches(step):
            with accelerator.accumulate(model):
                # its backward divides by the accumulation steps itself
                loss = work.mean_loss(model(batch)) * ACCUMULATION
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
                set_rate(optimizer, work.rate(step))
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / ACCUMULATION
        line(step, accelerator.reduce(total), norm)
        yield


def with_fabric(work: Workload) -> Iterator[None]:
    strategy: Any = "auto"
    if work.world > 1:
        strategy = lightning_fabric.strategies.DDPStrategy(process_group_backend="gloo")
    fabric = lightning_fabric.Fabric(accelerator="cpu", devices=1 if work.world == 1 else work.world, strategy=strategy)
    fabric.launch()
    gpt = work.model()
    model, optimizer = fabric.setup(Loss(gpt), adamw(gpt, OPTIMIZER))
    for step in range(work.steps):
        total = torch.zeros(())
        for number, batch in enumerate(work.batches(step), start=1):
            with fabric.no_backward_sync(model, enabled=number < ACCUMULATION and work.world > 1):
                loss = work.mean_loss(model(batch))
                fabric.backward(loss)
            total += loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=OPTIMIZER.clip_norm, error_if_nonfinite=False)
        set_rate(optimizer, work.rate(step))
        optimizer.step()
        optimizer.zero_grad()
        line(step, fabric.all_reduce(total), norm)
        yield


def with_deepspeed(work: Workload) -> Iterator[None]:
    gpt = work.model()
    configuration = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": OPTIMIZER.clip_norm,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
    }
    engine, optimizer, _, _ = deepspeed.initialize(model=Loss(gpt), optimizer=adamw(gpt, OPTIMIZER), config=configuration)
    for step in range(work.steps):
        total = torch.zeros(())
        set_rate(optimizer, work.rate(step))
        for batch in work.batches(step):
            loss = work.mean_loss(engine(batch))
            engine.backward(loss * ACCUMULATION)  # it divides by the accumulation steps itself
            engine.step()
            total += loss.detach()
        if work.world > 1:
            dist.all_reduce(total)
        line(step, total, engine.get_global_grad_norm() or 0.0)
        yield


CONTENDERS: dict[str, Callable[[Workload], Iterator[None]]] = {
    "by hand": by_hand,
    "trainrun": with_trainrun,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
    "deepspeed": with_deepspeed,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200, help="counted steps of each contender (default: 200)")
    parser.add_argument("--size", choices=SIZES, action="append", help="default: all of them")
    parser.add_argument("--ranks", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.size or list(SIZES)
    if options.worker:
        (options.worker / "result.json").write_text(json.dumps(measure(sizes[0], options.rounds, options.worker)))
        return
    results = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_tokens(Path(folder))
            run_workers(size, options.rounds, options.ranks, Path(folder))
            results[size] = json.loads(Path(folder, "result.json").read_text())
        print_table(size, results[size])
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"ranks": options.ranks, "goal": GOAL, "sizes": results}, indent=1) + "\n")


def write_tokens(folder: Path) -> None:
    """A dataset of random bytes: what is learned does not matter here."""
    (folder / "text").write_bytes(random.Random(0).randbytes(4_000_000))
    write_dataset(find_documents([str(folder / "text")]), str(folder / "dataset"), held_out=0)


def run_workers(size: str, rounds: int, ranks: int, folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [__file__, f"--size={size}", f"--rounds={rounds}", f"--worker={folder}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The measurement ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def measure(size: str, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds of each contender's steps, round by round. Runs in every worker."""
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    warm_up = 10
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with contextlib.redirect_stdout(io.StringIO()):
        loops = {
            name: contender(Workload(size, rounds + warm_up + 1, folder, rank, world)) for name, contender in CONTENDERS.items()
        }
        source = random.Random(0)  # the same order on all ranks
        for number in range(rounds + warm_up):
            for name in source.sample(list(loops), len(loops)):
                start = time.perf_counter()
                next(loops[name])
                if number >= warm_up:
                    seconds[name].append(time.perf_counter() - start)
    ratios = {
        name: statistics.median(own / hand for own, hand in zip(values, seconds["by hand"], strict=True))
        for name, values in seconds.items()
    }
    return {"median_ms": {name: 1000 * statistics.median(values) for name, values in seconds.items()}, "ratios": ratios}


def print_table(size: str, result: dict[str, Any]) -> None:
    print(f"{size:<14}{'median ms':>10}{'ratio':>8}")
    for name, ratio in result["ratios"].items():
        goal = f"    (goal: {GOAL} or less)" if name == "trainrun" else ""
        print(f"{name:<14}{result['median_ms'][name]:>10.2f}{ratio:>8.3f}{goal}")


if __name__ == "__main__":
    main()
