"""From a checkpoint to a folder as Hugging Face's transformers reads it.

The weights go from the store straight into mapped files, each range checked against its digest: whatever the size of the
model, it takes little memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainrun.checkpoint.destination import CONFIG, destination
from trainrun.checkpoint.layout import Commit
from trainrun.checkpoint.parts import whole
from trainrun.checkpoint.read import kinds, load_into
from trainrun.checkpoint.tensors import Named, model_tensors
from trainrun.config import ConfigError, from_mapping
from trainrun.data.examples import open_examples
from trainrun.data.tokenizer import BYTES, END_OF_DOCUMENT, has_tokenizer, tokenizer_of
from trainrun.errors import CheckpointError
from trainrun.evaluation import tokenizer_name
from trainrun.models import huggingface
from trainrun.models.gpt import GPT
from trainrun.models.huggingface_export import take_along, write_configuration
from trainrun.models.llama import llama_config, llama_name, unlike_llama
from trainrun.models.safetensors_write import LARGEST_FILE, Kind, divide, file_names, mapped_file, write_index
from trainrun.settings import TrainSettings
from trainrun.settings.finetune import FineTuneSettings
from trainrun.store import Store, StoreError

DTYPES = ("float32", "bfloat16", "float16")
"""Into which weights can be converted."""

AT_ONCE = 256 * 1024**2
"""About how many bytes are read between two words on the progress."""


@dataclass
class Exported:
    """A model by the names that others know it by."""

    names: dict[str, str]
    """By the name in the checkpoint, the one in the files."""
    write_configuration: Callable[[Path], None] = lambda folder: None
    """Writes config.json and what belongs with it, such as the tokenizer."""
    remarks: list[str] = field(default_factory=list)
    """Sentences: what the folder lacks, and why."""


def export(
    store: Store,
    commit: Commit,
    target: str,
    *,
    dtype: str = "",
    largest_file: int = LARGEST_FILE,
    model: str = "",
    tokenizer: str = "",
    force: bool = False,
    done: Callable[[int], None] = lambda count: None,
) -> list[str]:
    """Write a checkpoint's model.

    Args:
        store: the run's folder.
        commit: of the checkpoint.
        target: a folder or ``s3://bucket/prefix``. It is complete when its config.json is there, which comes last.
        dtype: one of `DTYPES`, for weights of a floating type; "" leaves them as they are (fp32).
        largest_file: bytes of weights after which another file is begun.
        model: for a fine-tuned model, the folder that it came from, when it is no longer where the run took it from.
        tokenizer: for a pretrained model, the folder of its data's tokenizer.
        force: replace what is in ``target``.
        done: told of each number of bytes that was written.

    Returns:
        Sentences on what is not there.

    Raises:
        ConfigError: the target is not empty, or cannot be written; or an option does not fit the run.
        Damaged: the checkpoint is not what was written; nothing appears in ``target``.
    """
    there = {name: kind for name, kind in kinds(commit).items() if name.startswith("model/")}
    if not there:
        raise CheckpointError(f"The checkpoint of step {commit.step} has no tensors of a model.")
    exported = _naming(commit, there, dtype=dtype or "float32", model=model, tokenizer=tokenizer)
    wanted = [
        Kind(
            theirs,
            getattr(torch, dtype) if dtype and there[ours].is_floating_point() else there[ours].dtype,
            tuple(there[ours].shape),
        )
        for ours, theirs in exported.names.items()
    ]
    ours_of = {theirs: ours for ours, theirs in exported.names.items()}
    files = divide(wanted, largest_file)
    names = file_names(len(files))
    with destination(target, force=force) as (folder, ready):
        exported.write_configuration(folder)
        for name, kinds_of_file in zip(names, files, strict=True):
            with mapped_file(folder / name, kinds_of_file) as tensors:
                _fill({ours_of[theirs]: tensor for theirs, tensor in tensors.items()}, store, commit, done)
            ready(folder / name)
        if len(files) > 1:
            tensors_by_file = {name: [kind.name for kind in file] for name, file in zip(names, files, strict=True)}
            write_index(folder, tensors_by_file, sum(kind.bytes for kind in wanted))
    return exported.remarks


def _fill(targets: Named, store: Store, commit: Commit, done: Callable[[int], None]) -> None:
    group: list[tuple[str, Tensor]] = []

    def read() -> None:
        load_into([whole(name, tensor) for name, tensor in group], store, commit)
        done(sum(tensor.nbytes for _, tensor in group))
        group.clear()

    for item in targets.items():
        group.append(item)
        if sum(tensor.nbytes for _, tensor in group) > AT_ONCE:
            read()
    read()


# What the model is


def _naming(commit: Commit, there: Named, *, dtype: str, model: str, tokenizer: str) -> Exported:
    plain = {name: name.removeprefix("model/") for name in there}
    recorded = commit.settings.get("finetune", {})
    tuned = bool(recorded.get("model")) and all(name.startswith(huggingface.PREFIX) for name in plain.values())
    if tuned or model:
        settings = from_mapping(FineTuneSettings, recorded, source=f"the checkpoint of step {commit.step}")
        return _fine_tuned(commit, there, settings, dtype=dtype, folder=Path(model or settings.model))
    bundled = _bundled_settings(commit, there)
    if bundled is None:
        remark = f"The model is not one that trainrun brings: its weights have their own names, and there is no {CONFIG}."
        return Exported(plain, remarks=[remark])
    if unlike := unlike_llama(bundled.model):
        remark = (
            f"The model is not Llama's architecture ({', '.join(unlike)}), and transformers has no class for it: its weights "
            f"have their own names, and there is no {CONFIG}."
        )
        return Exported(plain, remarks=[remark])
    return _llama(commit, there, bundled, dtype=dtype, tokenizer=tokenizer)


def _bundled_settings(commit: Commit, there: Named) -> TrainSettings | None:
    """The settings of the run when its model is the bundled GPT."""
    try:
        settings = from_mapping(TrainSettings, commit.settings, source=f"the checkpoint of step {commit.step}")
    except ConfigError:
        return None
    embedding = there.get("model/embedding.weight")
    with torch.device("meta"):
        gpt = GPT(settings.model, vocabulary=1 if embedding is None else embedding.shape[0], context=1)
    same = {name: tensor.shape for name, tensor in model_tensors(gpt).items()} == {n: kind.shape for n, kind in there.items()}
    return settings if same else None


def _llama(commit: Commit, there: Named, settings: TrainSettings, *, dtype: str, tokenizer: str) -> Exported:
    known = tokenizer_name(commit) if commit.data else None  # a converted checkpoint does not tell
    if tokenizer and known not in (None, tokenizer_of(tokenizer).name):
        raise ConfigError(
            [f"The checkpoint was trained on tokens of {known}, not on those of --tokenizer {tokenizer}. Give the data's own."]
        )
    remarks = []
    end = tokenizer_of(tokenizer).end if tokenizer else END_OF_DOCUMENT if known == BYTES else None
    if known == BYTES:
        remarks.append(f"There is no tokenizer: a token is a byte, and {END_OF_DOCUMENT} ends a text.")
    elif not tokenizer:
        remarks.append("There is no tokenizer, since the run does not know its folder. Give it with --tokenizer.")
    config = llama_config(
        settings.model,
        vocabulary=there["model/embedding.weight"].shape[0],
        context=commit.data.get("sequence_length", settings.sequence_length),
        end=end,
    )

    def write(folder: Path) -> None:
        (folder / CONFIG).write_text(json.dumps({**config, "torch_dtype": dtype}, indent=1) + "\n")
        if tokenizer:
            take_along(Path(tokenizer), folder)

    return Exported({name: llama_name(name.removeprefix("model/")) for name in there}, write, remarks)


def _fine_tuned(commit: Commit, there: Named, settings: FineTuneSettings, *, dtype: str, folder: Path) -> Exported:
    """A model of transformers: named as it is there, with the configuration and tokenizer of the folder that it came from."""
    names = {name: name.removeprefix("model/").removeprefix(huggingface.PREFIX) for name in there}
    if not (folder / CONFIG).is_file():
        return Exported(names, remarks=[f"There is no {CONFIG} and no tokenizer, since {folder} has none. Give --model."])
    transformers = huggingface.import_transformers()
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    kind = getattr(transformers, huggingface.CLASSES[settings.task])
    architecture = kind._model_mapping[type(config)].__name__
    remarks = [] if has_tokenizer(folder) else [f"There is no tokenizer, since {folder} has none."]
    if settings.task == "classification":
        remarks += _name_classes(config, commit, there)

    def write(target: Path) -> None:
        write_configuration(config, target, architecture=architecture, dtype=dtype)
        take_along(folder, target)

    return Exported(names, write, remarks)


def _name_classes(config: Any, commit: Commit, there: Named) -> list[str]:
    """Put the names of the classes into a configuration: those of the run's data, if they are still there."""
    try:
        description = open_examples(str(commit.settings.get("data", ""))).description
        classes: tuple[str, ...] = description.classes
        config.pad_token_id = description.padding
        remarks = []
    except (ConfigError, StoreError) as error:
        head = [kind.shape[0] for name, kind in there.items() if name.endswith(("score.weight", "classifier.weight"))]
        classes = tuple(f"LABEL_{number}" for number in range(head[0] if head else 2))
        remarks = [f"The classes have no names, since the run's data cannot be opened ({error})."]
    huggingface.name_classes(config, classes)
    return remarks
