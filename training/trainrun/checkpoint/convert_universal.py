"""DeepSpeed's universal checkpoints: a folder for each parameter that trains, with a file for each piece of its state."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from trainrun.checkpoint.convert_deepspeed import LEFT_OUT, Files, Model, as_deepspeed_writes_it, fp32, untrained_parts
from trainrun.checkpoint.foreign import Foreign
from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.tensors import canonical
from trainrun.errors import CheckpointError
from trainrun.store import Store

_STATE_FILE = re.compile(r"zero/([^/]+)/(\w+)\.pt")


def read_universal(store: Store) -> Foreign:
    """A checkpoint from the folder of its files; raises as `trainrun.checkpoint.convert_deepspeed.read_deepspeed`."""
    files = Files(store, optimizer=False)
    with files.load(files.model[0]) as states:
        model = Model.of(states, store.url)
    shapes = {name: shape for group in model.groups for name, shape in group.items()}
    states_of: dict[str, list[str]] = {name: [] for name in shapes}
    for file in files.sizes:
        if (match := _STATE_FILE.fullmatch(file)) and match[1] in shapes:
            states_of[match[1]].append(match[2])
    lacking = [name for name, keys in states_of.items() if "fp32" not in keys]
    if lacking:
        raise CheckpointError(f"{store.url} lacks zero/{lacking[0]}/fp32.pt: the checkpoint is not whole.")
    left_out = list(LEFT_OUT)
    if not any("step" in keys for keys in states_of.values()):
        left_out.append("How often the optimizer stepped is taken from the checkpoint's own step: it tells it for no parameter.")
    return Foreign(
        format=f"DeepSpeed {model.version}, universal",
        step=model.step,
        bytes=sum(size for file, size in files.sizes.items() if _STATE_FILE.fullmatch(file)),
        parts=_parts(files, model, shapes, states_of),
        left_out=left_out,
    )


def _parts(files: Files, model: Model, shapes: dict[str, tuple[int, ...]], states_of: dict[str, list[str]]) -> Iterator[Part]:
    with as_deepspeed_writes_it():
        yield from untrained_parts(files, model)
        for name, keys in states_of.items():
            for key in keys:
                with files.load(f"zero/{name}/{key}.pt") as content:
                    yield _part(name, key, content["param"] if isinstance(content, dict) else content, shapes[name])
            if "step" not in keys and len(keys) > 1:  # what was made of stage 3 has none
                yield whole(f"optimizer/{canonical(name)}/step", torch.tensor(float(model.step)))


def _part(name: str, key: str, value: Tensor, shape: tuple[int, ...]) -> Part:
    if key == "fp32":
        return whole(f"model/{canonical(name)}", fp32(value.reshape(shape)))
    tensor = torch.as_tensor(value, dtype=torch.float32).reshape(()) if key == "step" else value.reshape(shape)
    return whole(f"optimizer/{canonical(name)}/{key}", tensor)
