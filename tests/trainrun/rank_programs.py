"""What the tests run as ranks, each in a process of its own. Imported by name, so that processes can find it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import writer_faults
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import trainrun
from trainrun import devices, probe
from trainrun.checkpoint import read, state
from trainrun.checkpoint.digest import tensors_digest
from trainrun.checkpoint.layout import Damaged
from trainrun.config import ConfigError
from trainrun.data.batch import Batch
from trainrun.errors import CheckpointError
from trainrun.models.gpt import GPT
from trainrun.optimizer import bundled
from trainrun.ranks import Ranks, join, seed_everything
from trainrun.run import Run
from trainrun.settle import settle
from trainrun.strategies.base import Strategy


class DroppedGPT(GPT):
    """The bundled GPT with dropout before its output, so that random streams matter."""

    def loss(self, batch: Batch) -> Tensor:
        logits = F.dropout(self(batch.inputs).float(), 0.2, training=self.training)
        return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


class Odd(nn.Module):
    """Everything that models may have beside matrices: batch statistics, an integer buffer, a frozen and a scalar parameter, a
    parameter of two modules, a recurrent layer. Nothing of it but ``loss`` is for trainrun."""

    counter: Tensor

    def __init__(self, settings: Any, *, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary, bias=False)
        self.output.weight = self.embedding.weight
        self.recurrent = nn.GRU(8, 8, batch_first=True)
        self.batch_norm = nn.BatchNorm1d(8)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))

    def loss(self, batch: Batch) -> Tensor:
        self.counter += 1
        hidden, _ = self.recurrent(self.embedding(batch.inputs))
        hidden = self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2) * self.frozen * self.scale
        return F.cross_entropy(self.output(hidden).flatten(0, 1), batch.targets.flatten(), reduction="sum")


def train(
    out: Path,
    *,
    arguments: list[str],
    dropout: bool = False,
    odd: bool = False,
    kill_at: int | None = None,
    kill_after_put: int | None = None,
    terminate: tuple[int, int] | None = None,
    pause: tuple[int, float] | None = None,
    faults: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The bundled loop, with faults.

    Args:
        out: folder of this rank, for parameters.
        odd: train `Odd` in the GPT's place.
        kill_at: SIGKILL this process in that step, when the save before it is committed.
        kill_after_put: SIGKILL this process when its writer has written so many objects.
        terminate: (rank, step): SIGTERM to that rank in the middle of that step.
        pause: (step, seconds): sleep in the middle of that step.
        faults: names of functions below that break something.
    """
    run = trainrun.start(arguments=arguments)
    for fault in faults:
        FAULTS[fault](run.ranks.rank)
    if kill_after_put is not None:
        writer_faults.fault(f"kill_rank_after_put({kill_after_put})")
    data = run.tokens()
    kind: Any = Odd if odd else DroppedGPT if dropout else GPT
    gpt = kind(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    train_state = run.state(model=model, optimizer=optimizer, data=data)
    resumed = train_state.resume()
    restored = digest(model.strategy, optimizer)
    seen, rates, losses, saved = [], [], [], {}
    for step in run.steps():
        if step == kill_at:
            train_state.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        if terminate == (run.ranks.rank, step):
            os.kill(os.getpid(), signal.SIGTERM)
        if pause is not None and pause[0] == step:
            time.sleep(pause[1])
        losses.append(0.0)
        for batch in data.micro_batches():
            seen.append((step, batch.inputs.tolist()))
            loss = model.loss(batch)
            losses[-1] += float(loss.detach())
            run.backward(loss)
        run.step(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
        if train_state.save():
            saved[str(step)] = digest(model.strategy, optimizer)
    np.savez(out / "parameters.npz", **{name: whole(p).numpy() for name, p in gpt.named_parameters()})
    return {
        "resumed": resumed,
        "restored": restored,
        "saved": saved,
        "final": digest(model.strategy, optimizer),
        "seen": seen,
        "losses": losses,
        "rates": rates,
        "tokens": run.tokens_done,
    }


def idle(out: Path, *, arguments: list[str]) -> dict[str, Any]:
    """What is said of a model with a layer that its loss does not use."""
    run = trainrun.start(arguments=arguments)
    data = run.tokens()
    gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    gpt.idle = torch.nn.Linear(2, 2)
    model, optimizer = run.prepare(gpt, torch.optim.SGD(gpt.parameters(), lr=0.1))
    for batch in data.micro_batches():
        run.backward(model.loss(batch))
    try:
        run.step(optimizer)
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def chosen(out: Path, *, arguments: list[str], bytes_of_memory: int | None = None) -> dict[str, Any]:
    """What the strategy "auto" becomes.

    Args:
        bytes_of_memory: what this rank has; by default the machine's share.
    """
    run = trainrun.start(arguments=arguments)
    if bytes_of_memory is not None:
        devices.memory = lambda device, *, local_size: devices.Memory(bytes_of_memory, bytes_of_memory)
    gpt = GPT(run.settings.model, vocabulary=run.tokens().vocabulary, context=run.settings.sequence_length)
    run.prepare(gpt, bundled(gpt, run.settings.optimizer))
    return {"strategy": run.settings.strategy}


def finetune(out: Path, *, arguments: list[str], stop: bool = False) -> dict[str, Any]:
    """The fine-tuning recipe, as a command would run it; what it made is in its export and its metric lines.

    Args:
        out: folder of this rank.
        stop: ask for a stop beforehand, so that the run saves after its first step and ends.
    """
    from trainrun import finetune as recipe  # transformers takes seconds to import

    sys.argv = ["finetune", *arguments]
    if stop:
        (out / "state").mkdir()
        (out / "state/stop").touch()
    recipe.main()
    return {}


def collect(out: Path, *, value: Any) -> dict[str, Any]:
    """What ranks tell each other."""
    run = trainrun.start(arguments=[])
    mine = {"rank": run.ranks.rank, "value": value * (run.ranks.rank + 1)}
    return {"gathered": run.ranks.gather(mine), "from_first": run.ranks.from_first(mine if run.ranks.first else None)}


def probed(out: Path, *, configurations: list[list[str]]) -> list[dict[str, Any]]:
    """Several configurations in turn; rank 1 finds that two sequences fit, whatever was measured."""
    ranks = join(timeout_seconds=30, storage_timeout_seconds=30)
    original = probe.Measured
    if ranks.rank == 1:
        probe.Measured = lambda **values: original(
            **{**values, "budget": values["taken"] - (values["sequences"] - 2) * values["per_sequence"]}
        )
    return [_probed(ranks, arguments) for arguments in configurations]


def _probed(ranks: Ranks, arguments: list[str]) -> dict[str, Any]:
    settings = settle(None, arguments)
    seed_everything(settings.seed)
    run = Run(settings, ranks, None)
    data = run.tokens()
    gpt = DroppedGPT(settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
    model, optimizer = run.prepare(gpt, bundled(gpt, settings.optimizer))
    sizes = []
    for _ in run.steps():
        for batch in data.micro_batches():
            sizes.append(len(batch.inputs))
            run.backward(model.loss(batch))
        run.step(optimizer)
    return {"sizes": sizes, "chosen": run.settings.micro_batch, "final": digest(model.strategy, optimizer)}


def parity(out: Path, **keywords: Any) -> dict[str, Any]:
    """Several configurations in turn (see strategies/parity.py)."""
    import parity

    return parity.run_rank(out, **keywords)


def reshard(out: Path, **keywords: Any) -> dict[str, Any]:
    """Several checkpoints in turn (see checkpoint/resharding.py)."""
    import resharding

    return resharding.run_rank(out, **keywords)


def save_as_others_do(out: Path, **keywords: Any) -> dict[str, Any]:
    """Checkpoints of other libraries (see checkpoint/foreign.py)."""
    import foreign

    return foreign.run_rank(out, **keywords)


def saves(out: Path, **keywords: Any) -> dict[str, Any]:
    """Saves that meet one trouble after the other (see checkpoint/saves.py)."""
    import saves

    return saves.run_rank(out, **keywords)


def bitwise(out: Path, **keywords: Any) -> dict[str, Any]:
    """Runs by every strategy, which may be killed (see checkpoint/bitwise.py)."""
    import bitwise

    return bitwise.run_rank(out, **keywords)


def troubled(out: Path, **keywords: Any) -> dict[str, Any]:
    """Saves and restores by a store that harms requests (see checkpoint/troubled.py)."""
    import troubled

    return troubled.run_rank(out, **keywords)


def stops(out: Path, **keywords: Any) -> dict[str, Any]:
    """Runs that are asked to stop (see checkpoint/stops.py)."""
    import stops as cases

    return cases.run_rank(out, **keywords)


def requests_to_save(out: Path, **keywords: Any) -> dict[str, Any]:
    """Runs that are asked for a checkpoint from outside (see checkpoint/requests_to_save.py)."""
    import requests_to_save as cases

    return cases.run_rank(out, **keywords)


def many(out: Path, **keywords: Any) -> dict[str, Any]:
    """Many saves (see checkpoint/many.py)."""
    import many

    return many.run_rank(out, **keywords)


def whole(parameter: Tensor) -> Tensor:
    """All of a parameter, on every rank."""
    parameter = parameter.detach()
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def digest(strategy: Strategy, optimizer: torch.optim.Optimizer) -> str:
    """A digest of what this rank has of all parameters and of the optimizer's state."""
    parts = [*strategy.model_parts(), *strategy.optimizer_parts(optimizer)]
    return tensors_digest((part.name, part.local) for part in sorted(parts, key=lambda part: (part.name, part.start)))


def _fault_rank_1_sees_no_checkpoint(rank: int) -> None:
    if rank == 1:
        state.committed_steps = lambda store: []


def _fault_rank_1_reads_damage_at_step_4(rank: int) -> None:
    original = read.load_into

    def load_into(targets: Any, store: Any, commit: Any) -> None:
        if commit.step == 4:
            raise Damaged("rank 1 read something else")
        original(targets, store, commit)

    if rank == 1:
        read.load_into = load_into


FAULTS = {name.removeprefix("_fault_"): value for name, value in list(globals().items()) if name.startswith("_fault_")}

PROGRAMS = {
    "train": train,
    "finetune": finetune,
    "idle": idle,
    "collect": collect,
    "probed": probed,
    "parity": parity,
    "reshard": reshard,
    "bitwise": bitwise,
    "troubled": troubled,
    "many": many,
    "saves": saves,
    "save_as_others_do": save_as_others_do,
    "chosen": chosen,
    "stops": stops,
    "requests_to_save": requests_to_save,
}


def enter(program: str, out: Path, environment: dict[str, str], keywords: dict[str, Any]) -> None:
    """Run one program as a rank: output to ``out/log``, result to ``out/result.json``."""
    os.environ.update(environment)
    log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    code = 1
    try:
        (out / "result.json").write_text(json.dumps(PROGRAMS[program](out, **keywords)))
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except (ConfigError, CheckpointError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the process was forked from a server, whose exit handlers are not its own
