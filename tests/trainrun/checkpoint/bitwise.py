"""Ranks that train one run after the other by every strategy, and that are killed while a save is on its way: what
`test_bitwise` runs."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fault_store import Faults
from rank_programs import DroppedGPT, digest

from trainrun.optimizer import bundled
from trainrun.ranks import Ranks, join, seed_everything
from trainrun.run import Run
from trainrun.settle import settle

LONGEST_WAIT = 60.0
"""Seconds for a request to be seen."""


def run_rank(out: Path, *, runs: dict[str, list[str]], kill: dict[str, Any] | None = None) -> dict[str, Any]:
    """The program of one rank.

    Args:
        runs: by name, in this order: the arguments of each.
        kill: ``step``, in the middle of which the ranks of each run are killed, as soon as the S3 at AWS_ENDPOINT_URL has seen
            requests that match each of ``seen`` with the run's name for NAME. Then the result is how each ended.
    """
    if kill is None:
        joined = join(timeout_seconds=60.0, storage_timeout_seconds=60.0)
        return {name: _train(joined, arguments, None) for name, arguments in runs.items()}
    _import_what_takes_long(runs)
    return {
        name: _forked(number, arguments, {**kill, "seen": [pattern.replace("NAME", name) for pattern in kill["seen"]]})
        for number, (name, arguments) in enumerate(runs.items())
    }


def _import_what_takes_long(runs: dict[str, list[str]]) -> None:
    """Once, and not in each of the processes that are killed."""
    if any("--strategy=zero" in argument for arguments in runs.values() for argument in arguments):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401


def _forked(number: int, arguments: list[str], kill: dict[str, Any]) -> int:
    """Train in a process of its own, in a group of its own; how it ended."""
    child = os.fork()
    if child == 0:
        try:
            _meet_apart(number)
            _train(join(timeout_seconds=60.0, storage_timeout_seconds=60.0), arguments, kill)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _meet_apart(number: int) -> None:
    """Let this group not find the addresses of the one before it."""
    address, port, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    store = dist.PrefixStore(str(number), dist.TCPStore(address, int(port), is_master=False))
    dist.init_process_group = functools.partial(dist.init_process_group, store=store, rank=int(rank), world_size=int(size))


def _train(joined: Ranks, arguments: list[str], kill: dict[str, Any] | None) -> dict[str, Any]:
    settings = settle(None, arguments)
    run = Run(settings, dataclasses.replace(joined, tensor_parallel=settings.sharding.tensor_parallel), None)
    data = run.tokens()
    seed_everything(settings.seed)
    gpt = DroppedGPT(settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, settings.optimizer))
    state = run.state(model=model, optimizer=optimizer, data=data)
    resumed = state.resume()
    digests, losses, rates, seen = {resumed: digest(model.strategy, optimizer)}, [], [], []
    for step in run.steps():
        losses.append(0.0)
        seen.append([])
        for batch in data.micro_batches():
            loss = model.loss(batch)
            losses[-1] += float(loss.detach())
            seen[-1] += batch.inputs.tolist()
            run.backward(loss)
        if kill is not None and step == kill["step"]:
            _die(kill["seen"])
        run.step(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        state.save()
        digests[step] = digest(model.strategy, optimizer)
    return {
        "resumed": resumed,
        "digests": {str(step): value for step, value in digests.items()},
        "losses": losses,
        "rates": rates,
        "seen": seen,
        "tokens": run.tokens_done,
    }


def _die(seen: list[str]) -> None:
    """SIGKILL this process, once all of ``seen`` was asked of the store."""
    faults = Faults(os.environ["AWS_ENDPOINT_URL"])
    deadline = time.monotonic() + LONGEST_WAIT
    while not all(faults.count(pattern) for pattern in seen):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all of {seen} among {faults.requests}")
        time.sleep(0.01)
    named = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
    print("mapped by name: ", [line for line in named if "(deleted)" not in line], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
