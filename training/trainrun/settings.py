"""TrainSettings: everything about how a run trains, with its defaults.

Standard library only: the CDK side checks a job's configuration against it at synth, the node reads it at start.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from trainrun.config import ConfigError

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The bundled GPT. Ignored by scripts that bring a model of their own."""

    layers: int = 4
    width: int = 128
    """Size of the residual stream; a multiple of heads."""
    heads: int = 4
    tied: bool = True
    """Whether the output layer shares the embedding's weights."""

    def __post_init__(self) -> None:
        problems = []
        if min(self.layers, self.width, self.heads) < 1:
            problems.append(f"layers, width and heads are {self.layers}, {self.width} and {self.heads}. Allowed: 1 or more.")
        elif self.width % self.heads or (self.width // self.heads) % 2:
            problems.append(f"width is {self.width} with {self.heads} heads. Allowed: an even multiple of heads.")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """AdamW with linear warm-up and cosine decay: the learning rate is a function of the step alone."""

    learning_rate: float = 3e-3
    warmup_steps: int = 20
    final_fraction: float = 0.1
    """Learning rate at the last step, as a fraction of the peak."""
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""

    def __post_init__(self) -> None:
        problems = []
        if not self.learning_rate > 0:
            problems.append(f"learning_rate is {self.learning_rate}. Allowed: more than 0.")
        for name in ("warmup_steps", "weight_decay", "clip_norm"):
            if not getattr(self, name) >= 0:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 or more.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 0 to less than 1.")
        if not 0 <= self.final_fraction <= 1:
            problems.append(f"final_fraction is {self.final_fraction}. Allowed: 0 to 1.")
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are written and how many are kept."""

    location: str = ""
    """URL or directory under which runs are kept. A node takes it from the RunSpec; empty elsewhere means none."""
    every_steps: int = 100
    keep: int = 3
    """Newest commits kept, at least 2: one to restore and one to fall back on."""
    timeout_seconds: float = 300.0
    """How long one rank may take to write its shard before the save counts as failed."""

    def __post_init__(self) -> None:
        problems = []
        if self.every_steps < 1:
            problems.append(f"every_steps is {self.every_steps}. Allowed: 1 or more.")
        if not self.timeout_seconds > 0:
            problems.append(f"timeout_seconds is {self.timeout_seconds}. Allowed: more than 0.")
        if self.keep < 2:
            problems.append(
                f"keep is {self.keep}. Allowed: 2 or more, so that a damaged checkpoint has one before it to fall back on."
            )
        if problems:
            raise ConfigError(problems)


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """All of it. Layers: these defaults <- a YAML or JSON file <- the RunSpec <- ``--a.b=c``."""

    run: str = "run"
    """Name of the run; a node takes it from the RunSpec. The same name resumes, another starts anew."""
    data: str = ""
    """URL or directory of the token dataset that is trained on, as `trainrun tokens` wrote it."""
    steps: int = 1000
    """Optimizer steps in all."""
    batch_tokens: int = 16384
    """Tokens per optimizer step over all ranks: a multiple of sequence_length. The number of ranks does not change it."""
    micro_batch: int = 8
    """Most sequences per rank in one forward pass; what a rank has beyond it is accumulated."""
    sequence_length: int = 256
    strategy: Literal["ddp"] = "ddp"
    precision: Literal["fp32", "bf16"] = "fp32"
    seed: int = 0
    log_every: int = 1
    """Steps between two metric lines."""
    collective_timeout_seconds: float = 60.0
    """How long a rank waits in a collective before it counts its peers as lost."""
    first_collective_timeout_seconds: float = 600.0
    """The same, until the first step is done."""
    model: ModelSettings = field(default_factory=ModelSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def __post_init__(self) -> None:
        problems = []
        if not RUN_NAME.fullmatch(self.run) or ".." in self.run:
            problems.append(
                f"run is {self.run!r}. Allowed: a folder's name of letters, digits and . _ - / after a first letter or digit."
            )
        for name in ("collective_timeout_seconds", "first_collective_timeout_seconds"):
            if not getattr(self, name) > 0:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: more than 0.")
        for name in ("steps", "batch_tokens", "micro_batch", "sequence_length", "log_every"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 1 or more.")
        if self.sequence_length >= 1 and self.batch_tokens % self.sequence_length:
            problems.append(
                f"batch_tokens is {self.batch_tokens}, not a multiple of sequence_length ({self.sequence_length}). "
                f"The nearest that is: {max(1, round(self.batch_tokens / self.sequence_length)) * self.sequence_length}."
            )
        if problems:
            raise ConfigError(problems)
