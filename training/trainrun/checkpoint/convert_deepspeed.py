"""DeepSpeed's ZeRO checkpoints, of stages 1 to 3 and any number of ranks, as parts of whole tensors by name.

They are read without DeepSpeed. Stages 1 and 2 tell, for each rank, where in its share of the flattened parameters each of
them lies (``param_slice_mappings``); stage 3 cuts each parameter into as many equal stretches as there are ranks.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainrun.checkpoint.foreign import Foreign
from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.pickles import load_torch_file
from trainrun.checkpoint.tensors import canonical
from trainrun.directory import DirectoryStore
from trainrun.errors import CheckpointError
from trainrun.store import Store
from trainrun.strategies.zero_parts import Stretch
from trainrun.words import counted

LEFT_OUT = (
    "Random streams, the position in the data and a loss scale are not carried over.",
    "The state of the learning rate's schedule is not carried over: here it is a function of the step.",
)

_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)(?:_\d+)?_model_states\.pt")
_OTHERS = {
    r"layer_\d+.*-model": "pipeline parallelism",
    r"(layer_\d+_)?expert_\d+": "experts (mixture of experts)",
}


def folder_of(store: Store) -> Store | None:
    """Where in ``store`` the files of DeepSpeed's newest checkpoint are: there, or in the folder that ``latest`` names."""
    names = [item.key for item in store.list()]
    latest = next((name for name in ("latest", "latest_universal") if name in names), None)
    if latest is not None:
        tag = store.get(latest).decode(errors="replace").strip()
        if not re.fullmatch(r"[\w.-]+", tag) or not any(name.startswith(f"{tag}/") for name in names):
            raise CheckpointError(f"{store.locate(latest)} names {tag!r}, and there is no such folder beside it.")
        return store.child(tag)
    return store if any(_MODEL_FILE.fullmatch(name) for name in names) else None


def is_universal(store: Store) -> bool:
    """Whether the folder of a checkpoint is one that DeepSpeed's ds_to_universal made."""
    return any(item.key.endswith("/fp32.pt") for item in store.list("zero/"))


def read_deepspeed(store: Store) -> Foreign:
    """A checkpoint from the folder of its files.

    Raises:
        CheckpointError: files are missing, are of no ZeRO stage, or of a kind that is not read (pipeline and tensor
            parallelism, experts); and what `trainrun.checkpoint.pickles` refuses.
    """
    files = Files(store, optimizer=True)
    with files.load(files.model[0]) as states:
        model = Model.of(states, store.url)
        stretches = files.model if model.stage_3 else files.model[:1]
        if model.stage_3 and len(stretches) != len(files.optimizer):
            raise CheckpointError(
                f"{store.url} has {len(stretches)} files of the model for {len(files.optimizer)} of the optimizer."
            )
    left_out = list(LEFT_OUT)
    stage = 3 if model.stage_3 else "1 or 2"
    return Foreign(
        format=f"DeepSpeed {model.version}, ZeRO stage {stage}, {counted(len(files.optimizer), 'rank')}",
        step=model.step,
        bytes=sum(files.sizes[name] for name in [*stretches, *files.optimizer]),
        parts=_parts(files, model, left_out),
        left_out=left_out,
    )


class Files:
    """The files of one checkpoint, by rank."""

    def __init__(self, store: Store, *, optimizer: bool) -> None:
        self._store = store
        self.sizes = {item.key: item.size for item in store.list()}
        for pattern, what in _OTHERS.items():
            if any(re.match(pattern, name) for name in self.sizes):
                raise CheckpointError(f"{store.url} was written with {what}, which convert does not read.")
        self.optimizer = self._by_rank(_OPTIMIZER_FILE) if optimizer else []
        self.model = self._by_rank(_MODEL_FILE)
        if not self.model or (optimizer and not self.optimizer):
            kind = "model's" if not self.model else "optimizer's"
            raise CheckpointError(
                f"{store.url} has none of the {kind} files of a ZeRO checkpoint (stage 1, 2 or 3), "
                f"among {counted(len(self.sizes), 'file')}."
            )

    def _by_rank(self, pattern: re.Pattern[str]) -> list[str]:
        found: dict[int, str] = {}
        for name in self.sizes:
            if match := pattern.fullmatch(name):
                if int(match[2]):
                    raise CheckpointError(f"{self._store.url} was written with tensor parallelism, which convert does not read.")
                found[int(match[1] or 0)] = name
        missing = sorted(set(range(max(found, default=-1) + 1)) - found.keys())
        if missing:
            raise CheckpointError(f"{self._store.url} lacks the file of rank {missing[0]} beside {found[max(found)]}.")
        return [found[rank] for rank in sorted(found)]

    @contextmanager
    def load(self, name: str) -> Iterator[Any]:
        """A file's content; its tensors are of use only inside the context. From S3 it is fetched to a temporary folder."""
        if isinstance(self._store, DirectoryStore):
            yield load_torch_file(self._store.directory / name)
            return
        with tempfile.TemporaryDirectory(prefix="trainrun-convert-") as folder:
            path = Path(folder, name.replace("/", "-"))
            self._store.get_file(name, path)
            yield load_torch_file(path)


@dataclass(frozen=True)
class Model:
    """What the file of the model tells of all the others."""

    groups: list[dict[str, tuple[int, ...]]]
    """Shapes by name of what trains, for each group of the optimizer's, in the order of the flattened line."""
    frozen: dict[str, tuple[int, ...]]
    """Shapes of parameters that do not train, of which each rank has a stretch (stage 3)."""
    plain: list[str]
    """Names of what lies whole in the file of the model."""
    step: int
    version: str
    stage_3: bool

    @classmethod
    def of(cls, states: Any, url: str) -> Model:
        wanted = ("module", "param_shapes", "buffer_names", "global_steps")
        if not isinstance(states, dict) or any(key not in states for key in wanted) or not states["param_shapes"]:
            raise CheckpointError(f"The file of the model in {url} is not of a ZeRO checkpoint of stage 1, 2 or 3.")
        groups = [{name: tuple(shape) for name, shape in group.items()} for group in states["param_shapes"]]
        trained = {name for group in groups for name in group}
        # the weights of stage 3 are with the optimizer: what stands for them in the model is empty
        stage_3 = all(states["module"][name].numel() == 0 for name in trained if name in states["module"])
        shared = set(states.get("shared_params") or {})
        plain = [name for name in states["module"] if name not in trained and name not in shared]
        frozen = states.get("frozen_param_shapes") or {}
        if stage_3:
            plain = [name for name in plain if name in states["buffer_names"]]
        return cls(
            groups,
            {name: tuple(shape) for name, shape in frozen.items()} if stage_3 else {},
            plain,
            int(states["global_steps"]),
            str(states.get("ds_version")),
            stage_3,
        )


def _parts(files: Files, model: Model, left_out: list[str]) -> Iterator[Part]:
    with as_deepspeed_writes_it():
        yield from untrained_parts(files, model)
        done: dict[str, int] = {}
        for rank, name in enumerate(files.optimizer):
            with files.load(name) as states:
                yield from _trained_parts(model, _Share.of(states, model, files, rank, left_out), rank, done)


@contextmanager
def as_deepspeed_writes_it() -> Iterator[None]:
    """Around the reading of what files of DeepSpeed hold: something else in them is said in a sentence."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"The files are not as DeepSpeed writes them: {type(error).__name__}: {error}.") from error


def untrained_parts(files: Files, model: Model) -> Iterator[Part]:
    """Buffers and frozen parameters."""
    with files.load(files.model[0]) as states:
        for name in model.plain:
            yield whole(f"model/{canonical(name)}", fp32(states["module"][name]))
    if model.frozen:
        for rank, name in enumerate(files.model):
            with files.load(name) as states:
                yield from _frozen_parts(model, states["frozen_param_fragments"], rank)


def _frozen_parts(model: Model, fragments: Mapping[str, Tensor], rank: int) -> Iterator[Part]:
    for name, shape in model.frozen.items():
        flat = fragments[name].reshape(-1)
        stretch = _equal_stretch(name, shape, rank, flat.numel())
        yield from stretch.parts(f"model/{canonical(name)}", fp32(flat[: stretch.elements]))


def _equal_stretch(name: str, shape: tuple[int, ...], rank: int, size: int) -> Stretch:
    """Stage 3: the ``rank``-th stretch of ``size`` elements; the last ones are filled up beyond the tensor's end."""
    elements = torch.Size(shape).numel()
    start = min(rank * size, elements)
    return Stretch(canonical(name), shape, start, min(size, elements - start))


@dataclass(frozen=True)
class _Share:
    """What one rank has of each group."""

    weights: list[Tensor]
    state: dict[int, dict[str, Any]]
    places: list[Mapping[str, Any]] | None
    """Where each parameter lies (stages 1 and 2)."""
    ranks: int

    @classmethod
    def of(cls, states: Any, model: Model, files: Files, rank: int, left_out: list[str]) -> _Share:
        place = f"The file {files.optimizer[rank]}"
        try:
            zero = states["optimizer_state_dict"]
            weights = zero["fp32_flat_groups" if model.stage_3 else "single_partition_of_fp32_groups"]
            counts = zero["partition_count"]
            places = None if model.stage_3 else zero["param_slice_mappings"]
            optimizer = zero.get("optimizer_state_dict" if model.stage_3 else "base_optimizer_state")
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"{place} has no {error}: it is not of the DeepSpeed versions that convert reads.") from None
        expected = max(counts) if isinstance(counts, list) else counts
        if expected != len(files.optimizer) or len(weights) != len(model.groups):
            raise CheckpointError(
                f"{place} is of {counted(expected, 'rank')} and {counted(len(weights), 'group')}, but there are files of "
                f"{len(files.optimizer)} and the model has {len(model.groups)}: some are missing, or those of two are mixed."
            )
        state = state_by_group(optimizer)
        if not state and rank == 0:
            left_out.append("There is no optimizer state in it: only parameters were carried over.")
        return cls(list(weights), state, places, expected)


def state_by_group(optimizer: Any) -> dict[int, dict[str, Any]]:
    """The optimizer's state of each flattened group. Some optimizers count steps in their groups, not in their state."""
    if isinstance(optimizer, list):  # DeepSpeed's "elastic" checkpoints
        return dict(enumerate(optimizer))
    if not isinstance(optimizer, dict):
        return {}
    state = {int(number): dict(values) for number, values in optimizer.get("state", {}).items()}
    for number, group in enumerate(optimizer.get("param_groups", [])):
        if "step" in group and number in state:
            state[number].setdefault("step", group["step"])
    return state


def _trained_parts(model: Model, share: _Share, rank: int, done: dict[str, int]) -> Iterator[Part]:
    for number, shapes in enumerate(model.groups):
        flat = share.weights[number].reshape(-1)
        for stretch, offset in _stretches(shapes, share, number, rank, done):
            if offset + stretch.elements > flat.numel():
                raise CheckpointError(
                    f"Rank {rank} has {flat.numel()} elements of group {number}, where {offset + stretch.elements} should be. "
                    "If its optimizer was offloaded to NVMe, its weights are not in the checkpoint."
                )
            yield from stretch.parts(f"model/{stretch.name}", fp32(flat[offset:][: stretch.elements]))
            for key, value in share.state.get(number, {}).items():
                yield from _state_parts(stretch, key, value, offset, first=rank == 0)


def _stretches(
    shapes: Mapping[str, tuple[int, ...]], share: _Share, number: int, rank: int, done: dict[str, int]
) -> Iterator[tuple[Stretch, int]]:
    """This rank's stretch of each parameter of a group, also of no elements, and where it begins in the rank's flat tensors."""
    offset = 0
    for name, shape in shapes.items():
        if share.places is None:
            size = -(-torch.Size(shape).numel() // share.ranks)
            yield _equal_stretch(name, shape, rank, size), offset
            offset += size
            continue
        place = share.places[number].get(name)
        elements = int(place.numel) if place else 0
        start = done.get(name, 0)
        done[name] = start + elements
        yield Stretch(canonical(name), shape, start, elements), int(place.start) if place else 0


def _state_parts(stretch: Stretch, key: str, value: Any, offset: int, *, first: bool) -> Iterator[Part]:
    name = f"optimizer/{stretch.name}/{key}"
    if isinstance(value, Tensor) and value.dim():
        yield from stretch.parts(name, value.reshape(-1)[offset:][: stretch.elements])
    elif first and isinstance(value, Tensor | float | int):
        yield whole(name, torch.as_tensor(value, dtype=torch.float32))


def fp32(tensor: Tensor) -> Tensor:
    """A tensor of a floating type as checkpoints here have it."""
    return tensor.float() if tensor.is_floating_point() else tensor
