"""Settings of fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Task = Literal["causal", "masked", "classification"]


@dataclass(frozen=True, kw_only=True)
class FineTuneSettings:
    """What `trainrun.finetune` starts from and leaves behind. Of no meaning to other scripts."""

    model: str = ""
    """A Hugging Face model: a folder with config.json, tokenizer and safetensors, or a name on the hub."""
    task: Task = "causal"
    """Predict the next token, masked tokens, or the class of a text."""
    new_weights: tuple[str, ...] = ()
    """Beginnings of names of weights that the model's files may lack; they are drawn. A head for the task needs no mention."""
    unused_weights: tuple[str, ...] = ()
    """Beginnings of names of weights in the files that the model may leave unread. The head of another task needs no mention."""
    export: str = ""
    """Folder for the fine-tuned model, as transformers reads it, written after the last step; empty for none."""
