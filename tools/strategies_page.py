"""docs/strategies.md: what goes together, from the settings' own checks and from the configurations that tests train."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

from trainrun.config import ConfigError
from trainrun.settings import ShardingSettings, TrainSettings

TESTS = Path(__file__).resolve().parent.parent / "tests" / "trainrun" / "strategies"

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "ddp with tensor parallelism": {"strategy": "ddp", "tensor_parallel": 2},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2, hybrid": {"strategy": "fsdp2", "shard_size": 2},
    "fsdp2 with tensor parallelism": {"strategy": "fsdp2", "tensor_parallel": 2},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero3": {"strategy": "zero3"},
}
PRECISIONS = ("fp32", "bf16", "fp16", "fp8")
OFFLOADS = {
    "no offload": ("none", "none"),
    "optimizer to CPU": ("cpu", "none"),
    "parameters to CPU": ("none", "cpu"),
    "both to CPU": ("cpu", "cpu"),
    "optimizer to NVMe": ("nvme", "none"),
    "both to NVMe": ("nvme", "nvme"),
}
PARAMETERS_OF_SHARDING = ("tensor_parallel", "shard_size")


@dataclass(frozen=True)
class Cell:
    """One combination."""

    kind: str
    precision: str
    compiled: bool
    offload: str

    def refusal(self) -> str:
        """What is said to whoever asks for it, on any machine; empty when it is allowed."""
        optimizer, parameters = OFFLOADS[self.offload]
        try:
            chosen = dict(KINDS[self.kind])
            sharding = ShardingSettings(
                **{name: chosen.pop(name) for name in PARAMETERS_OF_SHARDING if name in chosen},
                offload_optimizer=optimizer,  # type: ignore[arg-type]
                offload_parameters=parameters,  # type: ignore[arg-type]
                nvme_path="/local" if "nvme" in (optimizer, parameters) else "",
            )
            TrainSettings(**chosen, precision=self.precision, compile=self.compiled, sharding=sharding)  # type: ignore[arg-type]
        except ConfigError as error:
            return " ".join(error.problems)
        return ""


CELLS = [Cell(*each) for each in product(KINDS, PRECISIONS, (False, True), OFFLOADS)]


def cell_of(settings: TrainSettings) -> Cell:
    """Where a run's settings stand in the table."""
    sharding = settings.sharding
    kind: str = settings.strategy
    if sharding.tensor_parallel > 1:
        kind += " with tensor parallelism"
    elif sharding.shard_size:
        kind += ", hybrid"
    here = (sharding.offload_optimizer, sharding.offload_parameters)
    offload = next(name for name, each in OFFLOADS.items() if each == here)
    return Cell(kind, settings.precision, settings.compile, offload)


def covered() -> dict[Cell, list[str]]:
    """By cell, the names of the configurations in it that a test compares with a plain loop: ``test_module[name]``."""
    found: dict[Cell, list[str]] = defaultdict(list)
    for module in parity_modules():
        for name, configuration in module.PARITY.items():
            found[cell_of(configuration.settings(""))].append(f"{module.__name__}[{name}]")
    return found


def parity_modules() -> list[ModuleType]:
    """The test modules that compare configurations with a plain loop."""
    for folder in (TESTS.parent, TESTS):  # as their conftest.py files do
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
    return [_loaded(path) for path in sorted(TESTS.glob("test_*.py")) if "\nPARITY" in path.read_text(encoding="utf-8")]


def _loaded(path: Path) -> ModuleType:
    specification = importlib.util.spec_from_file_location(path.stem, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def strategies_page() -> str:
    """The text of docs/strategies.md."""
    refusals: dict[str, int] = {}
    names = covered()
    tables = [_table(kind, names, refusals) for kind in KINDS]
    errors = [f"{number}. {text}" for text, number in refusals.items()]
    return "\n".join([INTRODUCTION, _tolerances(), TABLES, *tables, "### Refused\n", *errors, ""])


def _table(kind: str, names: dict[Cell, list[str]], refusals: dict[str, int]) -> str:
    offloads = [o for o in OFFLOADS if any(not c.refusal() for c in CELLS if (c.kind, c.offload) == (kind, o))]
    never = [offload for offload in OFFLOADS if offload not in offloads]
    lines = [f"### {kind}", "", f"| precision | compile | {' | '.join(offloads)} |", f"|---|---|{'---|' * len(offloads)}"]
    for precision, compiled in product(PRECISIONS, (False, True)):
        row = [_text(Cell(kind, precision, compiled, offload), names, refusals) for offload in offloads]
        lines.append(f"| {precision} | {'yes' if compiled else 'no'} | {' | '.join(row)} |")
    if never:
        refused = [f"{offload} [{_number(Cell(kind, 'fp32', False, offload).refusal(), refusals)}]" for offload in never]
        lines += ["", f"Refused at any precision: {', '.join(refused)}."]
    return "\n".join([*lines, ""])


def _text(cell: Cell, names: dict[Cell, list[str]], refusals: dict[str, int]) -> str:
    refusal = cell.refusal()
    if refusal:
        return f"refused [{_number(refusal, refusals)}]"
    if cell in names:
        return f"`{names[cell][0]}`"
    return "on GPUs that have it" if cell.precision == "fp8" else "allowed"


def _number(refusal: str, refusals: dict[str, int]) -> int:
    return refusals.setdefault(refusal, len(refusals) + 1)


def _tolerances() -> str:
    parity_modules()
    import parity  # type: ignore[import-not-found]

    rows = [
        f"| {kind} | {precision} | {each.loss:g} | {each.norm:g} | {each.parameters:g} |"
        for (kind, precision), each in parity.TOLERANCES.items()
    ]
    return "\n".join(
        ["| strategy | precision | loss, nats | gradient norm, relative | final parameters |", "|---|---|---|---|---|", *rows, ""]
    )


INTRODUCTION = """# Strategies

Made by `make docs` from the code and the tests. The user's loop is the same for all of them; `strategy` and the settings under
`sharding`, `precision`, `activation_checkpointing` and `compile` choose.

## Which one should I take?

Begin with `strategy: auto`, the default: it estimates the memory, takes the first of the first three rows that fits, and says
why. A parameter takes 16 bytes in all, and activations come on top:

| If the model | take |
|---|---|
| fits on one GPU | `ddp` |
| fits on the GPUs of one machine, and there are several machines | `fsdp2`, hybrid: `sharding.shard_size` = GPUs of a machine |
| fits on all of them only | `fsdp2` |
| fits on none of these | `activation_checkpointing: full` and a smaller `micro_batch`; then offload (slower) |
| has layers too large for one GPU, or there are more GPUs than sequences in a batch | tensor parallelism within a machine |
| comes with a DeepSpeed JSON file | its stage: `zero1` to `zero3` ([deepspeed.md](deepspeed.md)) |

Offload is `sharding.offload_optimizer: cpu` with `offload_parameters: cpu` for `fsdp2` and `zero3`, the optimizer's alone for
`zero1` to `zero3`; `nvme`, slower still, needs `zero3`. On GPUs from A100 on take `precision: bf16` with any of them.

## What they are

- **ddp**: the whole model on every rank. Gradients are summed while the backward pass runs.
- **fsdp2**: parameters, gradients and optimizer state divided among all ranks; each repeated layer is gathered before its use
  and let go after it. With `sharding.shard_size` the division is among so many neighbours and replicas are made over the rest
  (**hybrid**). Each micro-batch's gradients are summed into the shards at once: kept whole until the last micro-batch they
  would take the memory that sharding saves. Only the sum over replicas waits for the last one.
- **zero1, zero2, zero3**: DeepSpeed's ZeRO divides optimizer state, also gradients, also parameters.
- **tensor parallelism** (`sharding.tensor_parallel`): neighbouring ranks split each matrix product; with fsdp2, or with ddp
  where all ranks do. The bundled GPT can be split so. A model of one's own says how in a method `tensor_parallel_plan(ranks)`,
  which returns a word for each pattern of modules' names, as `{"layers.*.up": "columns", "layers.*.down": "rows"}`
  ([the words](../training/trainrun/strategies/tensor_parallel.py)); one without the method is refused.
- **auto**: ddp if it fits, else fsdp2 within each machine, else fsdp2; the run says why.

**Precision.** Weights that are updated and the optimizer's state are fp32 in every strategy. bf16 and fp16 are autocast's: it
decides what each operation computes in, the same in every strategy; fsdp2 and ZeRO also send parameters in that format, and
sum gradients in fp32. With fp16 the loss is scaled. When the gradient of a step is not finite, on whichever rank, all ranks
leave the update out: parameters and optimizer state stay as they were, the scale halves, and **the step counts**: step counter,
data and learning rates move on, so that every strategy and number of ranks sees the same data and rates at the same step. The
scale is part of a checkpoint. It begins at 2^16, where fsdp2, ZeRO and tensor parallelism, whose parameters compute in fp16,
may leave out a first step that ddp takes. fp8 computes the matrix products of the repeated layers by torchao's dynamic scaling
(`pip install "traincluster[fp8]"`), on NVIDIA GPUs of compute capability 8.9 or more; tests have seen its refusals, and once,
by hand, torchao 0.18's emulation on a CPU with ddp and fsdp2, but no GPU. `tf32` is for fp32 on NVIDIA GPUs from A100 on, and
an error elsewhere.

**Activation checkpointing** and **compile** work on the model's repeated layers (the elements of its `nn.ModuleList` or
`nn.Sequential` of layers of one class), before they are sharded. `activation_checkpointing: selective` is refused with zero3,
whose linear layers with a bias would get wrong gradients: take `full`, or fsdp2. Compiling needs a C++ compiler, which is
looked for before training. **The first compiled step can take a minute or more**: a small GPT took 20 s more of processor time
on a free CPU, and equal layers share what is compiled, so that 4 took as long as 12. Nothing is printed meanwhile.

## How well they agree

Each strategy trains a small GPT for 50 steps (learning rate warmed up and decayed, weight decay on matrices, some steps clipped,
several micro-batches a step) on 1, 2 and 4 processes, and is compared with a loop in plain PyTorch on one process **in fp32**.
Losses differ by at most 1e-6 nats in fp32, 2e-3 in bf16 and 4e-4 in fp16 (measured with ddp and fsdp2 on one machine), final
parameters by 2e-6, 0.022 and 0.008: one whose gradient is too small for the precision takes a step of another size, for Adam
divides by the gradient's own size. The tests let pass, for the sake of other machines (`tp` stands for tensor parallelism, with
ddp and with fsdp2; `zero` for zero1, zero2 and zero3, with and without offload):
"""

TABLES = """## What goes together

A cell names the test that trains this combination and compares it with the plain loop (of `tests/trainrun/strategies`, where it
is run on several processes); "allowed" is not run by a test of its own; "refused" is the error of that number below.
"""
