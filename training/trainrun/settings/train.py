"""TrainSettings: everything about how a run trains."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from trainrun.config import ConfigError
from trainrun.settings import combinations
from trainrun.settings.checkpoint import LONGEST_TIMEOUT, CheckpointSettings
from trainrun.settings.finetune import FineTuneSettings
from trainrun.settings.model import ModelSettings
from trainrun.settings.optimizer import OptimizerSettings
from trainrun.settings.profile import ProfileSettings
from trainrun.settings.sharding import ShardingSettings
from trainrun.settings.weights import WeightsSettings

Strategy = Literal["auto", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
Precision = Literal["fp32", "bf16", "fp16", "fp8"]
Checkpointing = Literal["none", "selective", "full"]

DEFAULT_BATCH_TOKENS = 16384

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")
STEP_FOLDER = re.compile(r"(^|/)step-\d+(/|$)")


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """All of it. Layers: these defaults <- a YAML or JSON file <- the RunSpec <- ``--a.b=c``."""

    run: str = "run"
    """Name of the run; a node takes it from the RunSpec. The same name resumes, another starts anew. torchrun takes ``--run`` for
    an option of its own: write ``torchrun ... train.py -- --run=NAME``."""
    data: str = ""
    """URL or directory of the dataset that is trained on, as `trainrun tokens` or `trainrun examples` wrote it."""
    steps: int = 1000
    """Optimizer steps in all."""
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    """Tokens per optimizer step over all ranks: a multiple of sequence_length. The number of ranks does not change it."""
    batch_examples: int = 0
    """Examples per optimizer step over all ranks, instead of batch_tokens, when the data are examples (fine-tuning)."""
    micro_batch: int | Literal["auto"] = 8
    """Most sequences per rank in one forward pass; what a rank has beyond it is accumulated. "auto" measures before training
    how many fit into memory, on all ranks alike."""
    sequence_length: int = 256
    """Tokens per sequence; examples are cut to as many and may be shorter."""
    strategy: Strategy = "auto"
    """How the model is spread over the ranks: a replica on each (ddp), sharded by PyTorch (fsdp2), or by DeepSpeed's ZeRO stage
    1 to 3. "auto" takes the one with the least communication that fits into memory, and says why."""
    precision: Precision = "fp32"
    """Of the computation; weights that are updated and the optimizer's state stay in fp32. fp16 comes with a dynamic loss
    scale. fp8 needs hardware that has it."""
    tf32: bool = False
    """Whether fp32 matrix products may use TF32 on NVIDIA GPUs that have it."""
    activation_checkpointing: Checkpointing = "none"
    """Recompute activations in the backward pass instead of keeping them: those of all but matrix products and attention
    (selective), or of whole blocks (full)."""
    compile: bool = False
    """Whether blocks are compiled by torch.compile. The first step may take a minute or more."""
    seed: int = 0
    log_every: int = 1
    """Steps between two metric lines."""
    collective_timeout_seconds: float = 60.0
    """How long a rank waits in a collective before it counts its peers as lost."""
    first_collective_timeout_seconds: float = 600.0
    """The same, until the first step is done."""
    deepspeed: dict[str, Any] | str = field(default_factory=dict)
    """A DeepSpeed configuration, or the path of such a JSON file, relative to the file that names it. What it says in DeepSpeed's
    words becomes the settings here; the rest (bucket sizes and the like) is handed to DeepSpeed. See docs/deepspeed.md."""
    sharding: ShardingSettings = field(default_factory=ShardingSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    weights: WeightsSettings = field(default_factory=WeightsSettings)
    finetune: FineTuneSettings = field(default_factory=FineTuneSettings)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    profile: ProfileSettings = field(default_factory=ProfileSettings)

    def __post_init__(self) -> None:
        problems = []
        if not RUN_NAME.fullmatch(self.run) or ".." in self.run:
            problems.append(
                f"run is {self.run!r}. Allowed: a folder's name of letters, digits and . _ - / after a first letter or digit."
            )
        if STEP_FOLDER.search(self.run):
            problems.append(
                f"run is {self.run!r}, which names a checkpoint's folder. Allowed: names without a part step-<number>."
            )
        for name in ("collective_timeout_seconds", "first_collective_timeout_seconds"):
            if not 0 < getattr(self, name) <= LONGEST_TIMEOUT:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: more than 0, at most {LONGEST_TIMEOUT:.0f} (a year).")
        if not -(2**63) <= self.seed < 2**63:
            problems.append(f"seed is {self.seed}. Allowed: -2**63 to 2**63 - 1.")
        if self.deepspeed == "":
            problems.append("deepspeed is empty. Allowed: a DeepSpeed configuration or its JSON file's path; or leave it out.")
        for name in ("steps", "batch_tokens", "micro_batch", "sequence_length", "log_every"):
            if getattr(self, name) != "auto" and getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}. Allowed: 1 or more.")
        if self.batch_examples < 0:
            problems.append(f"batch_examples is {self.batch_examples}. Allowed: 0 (batch_tokens counts) or more.")
        if self.batch_examples > 0 and self.batch_tokens != DEFAULT_BATCH_TOKENS:
            problems.append(
                f"batch_tokens is {self.batch_tokens} and batch_examples {self.batch_examples}, but a step has one size. Remove "
                "batch_tokens if the data are examples, and batch_examples if they are one stream of tokens."
            )
        elif self.batch_examples == 0 and self.sequence_length >= 1 and self.batch_tokens % self.sequence_length:
            problems.append(
                f"batch_tokens is {self.batch_tokens}, not a multiple of sequence_length ({self.sequence_length}). "
                f"The nearest that is: {max(1, round(self.batch_tokens / self.sequence_length)) * self.sequence_length}."
            )
        problems += combinations.problems(self)
        last_profiled = self.profile.start_step + self.profile.steps - 1
        if self.profile.start_step > 0 and last_profiled > self.steps:
            problems.append(
                f"profile.start_step is {self.profile.start_step} and profile.steps is {self.profile.steps}: the last of these "
                f"would be step {last_profiled}, and the run has {self.steps}. Start earlier, profile fewer, or train longer."
            )
        if problems:
            raise ConfigError(problems)
