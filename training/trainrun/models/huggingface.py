"""Models of Hugging Face's transformers, for fine-tuning: Llama-class decoders and BERT-class encoders.

A folder holds ``config.json``, the tokenizer and safetensors files (one, or several with an index). The model is made
without memory, and each rank reads of the files what its strategy keeps there (`trainrun.models.weights`). Everything is
trained in fp32, whatever the files hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED, Batch
from trainrun.data.examples import ExamplesDescription
from trainrun.data.tokenizer import HuggingFaceTokenizer, has_tokenizer
from trainrun.models.huggingface_files import find_weights
from trainrun.models.weights import SafetensorsWeights, parameters_without_memory
from trainrun.settings.finetune import FineTuneSettings, Task

PREFIX = "model."
"""Of the names of `HuggingFaceModel`'s tensors, before those that transformers gives them."""


class HuggingFaceModel(nn.Module):
    """A transformers model whose ``loss`` is the sum over a batch's valid tokens (of its classes, in classification)."""

    def __init__(self, model: nn.Module, task: Task) -> None:
        super().__init__()
        self.model, self.task = model, task

    @property
    def config(self) -> Any:
        """The configuration of transformers, by which a strategy knows the model's sizes."""
        return self.model.config

    def forward(self, batch: Batch) -> Tensor:
        """Logits: (sequences, length, vocabulary), or (sequences, classes)."""
        if self.task == "causal":  # no token sees the padding, which comes after all of them
            logits: Tensor = self.model(input_ids=batch.inputs, use_cache=False).logits
        else:
            logits = self.model(input_ids=batch.inputs, attention_mask=batch.present).logits
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Sum of the cross-entropies, in nats, of the valid targets."""
        logits = self(batch).float()
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch.targets.flatten(), ignore_index=IGNORED, reduction="sum")


@dataclass(frozen=True)
class Loaded:
    """A model without memory, and where its weights are."""

    model: HuggingFaceModel
    weights: SafetensorsWeights
    """For ``run.prepare(model, optimizer, weights=...)``."""
    folder: Path


def load_model(
    settings: FineTuneSettings,
    data: ExamplesDescription,
    *,
    sequence_length: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Loaded:
    """The model that ``settings.model`` names, for ``settings.task``.

    Args:
        data: what it is to learn.
        sequence_length: most tokens of a sequence.
        seed: of weights that are drawn because no file has them.
        say: told which weights are drawn, and which of the files' are not used.

    Raises:
        ConfigError: transformers is not installed; there is no such model, or it is not for the task; the data are of another
            tokenizer, or longer than the model allows; or the files' weights are not those of the model (each is named).
    """
    folder = model_folder(settings.model)
    transformers = import_transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{folder} has no config.json that transformers can read: {error}"]) from None
    _require_fit(config, folder, data, sequence_length)
    if settings.task == "classification":
        name_classes(config, data.classes)
        config.pad_token_id = data.padding  # a decoder looks for the last token before it
    kind = getattr(transformers, CLASSES[settings.task])
    try:
        with parameters_without_memory():
            model = kind.from_config(config, attn_implementation="sdpa", dtype="float32")
    except ValueError as error:
        first = str(error).splitlines()[0]
        raise ConfigError(
            [f"The model in {folder} ({config.model_type}) is not for the task {settings.task!r}: {first}"]
        ) from None
    weights = find_weights(model.train(), folder, settings, prefix=PREFIX, seed=seed, say=say)
    return Loaded(HuggingFaceModel(model, settings.task), weights, folder)


def model_folder(name: str) -> Path:
    """The folder of a model: ``name`` itself, or where the hub's client keeps what it fetches under that name.

    Raises:
        ConfigError: there is no such folder, and the hub does not give the model.
    """
    if not name:
        raise ConfigError(["No model is named. Set finetune.model to the folder of a Hugging Face model."])
    if Path(name).is_dir():
        return Path(name)
    import_transformers()
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))
    except (OSError, ValueError) as error:
        raise ConfigError(
            [f"{name} is no folder here, and could not be fetched from the hub: {str(error).splitlines()[0]}"]
        ) from None


def import_transformers() -> Any:
    """The package.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        problem = f"Hugging Face models need the packages transformers and safetensors ({error})"
        raise ConfigError([f'{problem}: pip install "traincluster[transformers]".']) from None
    return transformers


def name_classes(config: Any, classes: Sequence[str]) -> None:
    """Put the names of classes, and so their number, into a configuration of transformers."""
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in enumerate(classes)}


CLASSES: dict[Task, str] = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "classification": "AutoModelForSequenceClassification",
}
"""transformers' classes by task."""


def _require_fit(config: Any, folder: Path, data: ExamplesDescription, sequence_length: int) -> None:
    problems = []
    if has_tokenizer(folder) and HuggingFaceTokenizer(folder).name != data.tokenizer:
        problems.append(
            f"The data were written with another tokenizer than that of {folder}: their tokens mean something else to the model. "
            f"Write them anew: python -m trainrun examples ... --tokenizer {folder}."
        )
    if data.vocabulary > config.vocab_size:
        problems.append(f"The data have token ids up to {data.vocabulary - 1}, the model in {folder} has {config.vocab_size}.")
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and sequence_length > positions:
        problems.append(f"sequence_length is {sequence_length}, the model in {folder} has {positions} positions. Set it lower.")
    if problems:
        raise ConfigError(problems)
