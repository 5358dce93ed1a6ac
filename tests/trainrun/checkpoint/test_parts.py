"""Parts of tensors: whoever has them, each element is written once, and any other parts can be read back."""

from __future__ import annotations

import itertools
import math
import tempfile
from typing import Any

import pytest
import torch
from fake_ranks import on_each_rank
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from trainrun.checkpoint import parts as parts_module
from trainrun.checkpoint.layout import Commit, Damaged, new_attempt, parse_commit
from trainrun.checkpoint.parts import Box, Part, cover, intersection, to_write, whole
from trainrun.checkpoint.read import kinds, load_into, read_tensors
from trainrun.checkpoint.snapshot import take_snapshot
from trainrun.checkpoint.tensors import Arrangement, model_parts, optimizer_parts, optimizer_targets
from trainrun.checkpoint.write import write_shard
from trainrun.config import ConfigError
from trainrun.directory import DirectoryStore
from trainrun.ranks import Ranks
from trainrun.store import Store, open_store

Partition = list[Box]


def commit_of(store: Store, *ranks: list[Part]) -> Commit:
    """What ranks with these parts write, without a look at whether it is whole."""
    attempt = new_attempt()
    shards = [
        write_shard(store, take_snapshot(own, {}), step=1, attempt=attempt, rank=rank, timeout_seconds=10)
        for rank, own in enumerate(ranks)
    ]
    commit = Commit(
        run="run", step=1, tokens=0, attempt=attempt, time=0.0, world=len(ranks), mesh={}, data={}, settings={}, versions={},
        shards=tuple(shards),
    )  # fmt: skip
    return parse_commit(commit.to_json(), 1)


def cut_out(name: str, tensor: Tensor, box: Box) -> Part:
    local = tensor[tuple(slice(start, stop) for start, stop in box)].clone()
    return Part(name, local, tuple(tensor.shape), tuple(start for start, _ in box))


# Any partition to any other


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> Partition:
    """Boxes that make up a whole: of straight cuts one after the other, some of which leave nothing on a side."""
    boxes = [tuple((0, size) for size in shape)]
    for _ in range(draw(st.integers(0, 5)) if shape else 0):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dimension = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(*box[dimension]))
        for side in ((box[dimension][0], at), (at, box[dimension][1])):
            boxes.append((*box[:dimension], side, *box[dimension + 1 :]))
    return boxes


@st.composite
def flat_fragments(draw: st.DrawFn, shape: tuple[int, ...]) -> Partition:
    """Boxes of a tensor of two dimensions that was cut anywhere in its flat memory, as ZeRO does."""
    rows, columns = shape
    cuts = sorted(draw(st.lists(st.integers(0, rows * columns), max_size=3)))
    boxes = []
    for start, stop in itertools.pairwise([0, *cuts, rows * columns]):
        while start < stop:
            row, column = divmod(start, columns)
            whole_rows = (stop - start) // columns if column == 0 else 0
            end = start + (whole_rows * columns if whole_rows else min(columns - column, stop - start))
            boxes.append(((row, row + max(1, whole_rows)), (0, columns) if whole_rows else (column, column + end - start)))
            start = end
    return boxes


shapes = st.lists(st.integers(1, 7), max_size=3).map(tuple)
two = st.tuples(st.integers(1, 6), st.integers(1, 6))


def either(shape: tuple[int, ...]) -> st.SearchStrategy[Partition]:
    return partitions(shape) | flat_fragments(shape) if len(shape) == 2 else partitions(shape)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.lists(shapes | two, min_size=1, max_size=3), st.sampled_from([4, 15, 64, 10**6]))
def test_what_any_ranks_wrote_any_others_read(data: st.DataObject, all_shapes: list[tuple[int, ...]], largest: int) -> None:
    tensors = {f"t{n}": torch.randn(shape) for n, shape in enumerate(all_shapes)}
    writers: list[list[Part]] = [[], [], []]
    for name, tensor in tensors.items():
        for box in data.draw(either(tuple(tensor.shape))):
            writers[data.draw(st.integers(0, 2))].append(cut_out(name, tensor, box))
    readers = [
        cut_out(n, torch.full_like(t, math.nan), box) for n, t in tensors.items() for box in data.draw(either(tuple(t.shape)))
    ]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts_module, "LARGEST_PIECE", largest)
        store = open_store(folder)
        commit = commit_of(store, *(to_write(own) for own in writers))
        load_into(readers, store, commit)
        for part in readers:
            assert torch.equal(part.local, cut_out("", tensors[part.name], part.box).local), part
        assert all(torch.equal(tensors[n], found) for n, found in read_tensors(store, commit, lambda n: True).items())


@settings(max_examples=200, deadline=None)
@given(st.data(), shapes | two)
def test_a_cover_is_told_from_one_that_leaves_out_or_doubles(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(either(shape))
    assert cover(boxes, shape)
    filled = [box for box in boxes if all(start < stop for start, stop in box)]
    chosen = data.draw(st.sampled_from(filled))
    rest = [box for box in filled if box is not chosen]
    assert not cover(rest, shape)
    assert not cover([*filled, chosen], shape)
    other = data.draw(st.sampled_from(filled))
    if other is not chosen and math.prod(b - a for a, b in other) == math.prod(b - a for a, b in chosen):
        assert not cover([*rest, other], shape)  # as many elements as the whole has, but not all of them


def test_a_cover_that_no_straight_cut_divides_is_one() -> None:
    pinwheel = [((0, 1), (0, 2)), ((0, 2), (2, 3)), ((2, 3), (1, 3)), ((1, 3), (0, 1)), ((1, 2), (1, 2))]
    assert cover(pinwheel, (3, 3))
    assert not cover([*pinwheel[:-1], ((0, 1), (1, 2))], (3, 3))


def test_many_slices_are_checked_in_no_time() -> None:
    grid = [((r, r + 1), (c, c + 1)) for r in range(100) for c in range(100)]
    assert cover(grid, (100, 100))
    assert not cover([*grid[:-1], grid[0]], (100, 100))


@pytest.mark.parametrize(
    "rows",
    [((0, 2),), ((0, 2), (3, 4)), ((0, 2), (1, 3)), ((0, 3), (2, 4)), ((0, 4), (0, 4))],
)
def test_slices_that_leave_out_or_double_something_are_damage(tmp_path: Any, rows: tuple[tuple[int, int], ...]) -> None:
    tensor = torch.arange(12.0).reshape(4, 3)
    with pytest.raises(Damaged, match=r"slices of the tensor w do not make up a whole of float32 \[4, 3\]"):
        commit_of(open_store(str(tmp_path)), *([cut_out("w", tensor, (own, (0, 3)))] for own in rows))


def test_slices_that_are_of_different_tensors_are_damage(tmp_path: Any) -> None:
    first = cut_out("w", torch.zeros(4), ((0, 2),))
    for other in (torch.zeros(4, dtype=torch.bfloat16), torch.zeros(5)):
        with pytest.raises(Damaged, match="do not make up a whole"):
            commit_of(open_store(str(tmp_path)), [first], [cut_out("w", other, ((2, 4),))])


def test_a_tensor_that_is_not_there_is_damage(tmp_path: Any) -> None:
    store = open_store(str(tmp_path))
    commit = commit_of(store, [whole("w", torch.zeros(4))])
    for part in (whole("v", torch.zeros(4)), whole("w", torch.zeros(5))):
        with pytest.raises(Damaged, match="is missing"):
            load_into([part], store, commit)


# What is read


class CountedStore(DirectoryStore):
    """Remembers which bytes were asked for."""

    def _read_block(self, key: str, start: int, into: memoryview, deadline: float | None) -> None:
        self.asked = [*getattr(self, "asked", []), (key, start, len(into))]
        super()._read_block(key, start, into, deadline)


def test_only_slices_that_a_rank_needs_are_read_and_each_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "LARGEST_PIECE", 8192)
    tensor = torch.randn(64, 256)  # 1 KiB a row, 8 rows a piece
    store = CountedStore(tmp_path)
    commit = commit_of(store, to_write([whole("w", tensor), whole("other", torch.zeros(10**5))]))
    targets = [cut_out("w", torch.zeros_like(tensor), ((row, row + 1), (0, 256))) for row in (17, 18, 30)]
    load_into(targets, store, commit)
    assert [length for _, _, length in store.asked] == [2 * 8192]  # rows 16 to 31, in one go
    assert all(torch.equal(part.local[0], tensor[part.start[0]]) for part in targets)


def test_reads_are_bounded(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "LARGEST_PIECE", 4096)
    monkeypatch.setattr("trainrun.checkpoint.read.TOGETHER", 10_000)
    store = CountedStore(tmp_path)
    tensor = torch.randn(3, 5000)  # rows longer than a piece are cut too
    commit = commit_of(store, to_write([whole("w", tensor)]))
    assert torch.equal(read_tensors(store, commit, lambda name: True)["w"], tensor)
    assert max(length for _, _, length in store.asked) <= 10_000
    assert sum(length for _, _, length in store.asked) < 1.01 * tensor.nbytes  # nothing twice


# Who writes


def test_ranks_that_hold_the_same_write_alike() -> None:
    sizes = (900, 500, 400, 300, 300, 200, 200, 200)
    loads = []
    names: list[str] = []
    for rank in range(3):
        parts = [whole(f"t{n}", torch.empty(size, dtype=torch.uint8), copies=3, copy=rank) for n, size in enumerate(sizes)]
        mine = to_write(parts)
        loads.append(sum(part.local.nbytes for part in mine))
        names += [part.name for part in mine]
    assert sorted(names) == [f"t{n}" for n in range(len(sizes))]
    assert sum(loads) == 3000
    assert max(loads) <= 1100


def test_one_large_tensor_is_shared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "LARGEST_PIECE", 1000)
    tensor = torch.empty(40, 100, dtype=torch.uint8)
    shares = [to_write([whole("w", tensor, copies=4, copy=rank)]) for rank in range(4)]
    assert [sum(part.local.nbytes for part in share) for share in shares] == [1000] * 4
    assert cover([part.box for share in shares for part in share], (40, 100))


def test_small_pieces_lie_together_so_that_a_few_requests_read_them() -> None:
    parts = [whole(f"{n}/{key}", torch.zeros(size)) for n in range(3) for key, size in (("moment", 100_000), ("step", 1))]
    names = [part.name for part in to_write(parts)]
    assert names == ["0/step", "1/step", "2/step", "0/moment", "1/moment", "2/moment"]


# DTensors


def check_ranks(found: list[list[Part]], tensors: dict[str, Tensor]) -> list[int]:
    """That parts hold what lies in their place, and that all ranks together write everything once; the bytes of each."""
    written: dict[str, list[Box]] = {name: [] for name in tensors}
    loads = []
    for own in found:
        for part in own:
            assert torch.equal(part.local, cut_out("", tensors[part.name], part.box).local), part
        mine = to_write(own)
        loads.append(sum(part.local.nbytes for part in mine))
        for part in mine:
            written[part.name].append(part.box)
    for name, tensor in tensors.items():
        assert cover(written[name], tuple(tensor.shape)), name
    return loads


SPREAD = {
    "sharded": ((4,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "hybrid": ((2, 2), [Replicate(), Shard(0)]),
    "replicas of columns": ((2, 2), [Shard(1), Replicate()]),
    "both dimensions": ((2, 2), [Shard(0), Shard(1)]),
    "one dimension twice": ((2, 2), [Shard(0), Shard(0)]),
    "three": ((2, 2, 2), [Replicate(), Shard(1), Shard(0)]),
    "everywhere": ((2, 2), [Replicate(), Replicate()]),
}


@pytest.mark.parametrize("case", SPREAD)
def test_dtensors_lie_where_torch_puts_them(case: str) -> None:
    sizes, placements = SPREAD[case]
    tensors = {f"t{i}": torch.randn(shape) for i, shape in enumerate([(8, 4), (7, 5), (3, 3), (1, 2), (5, 1), (16, 16)])}

    def parts(ranks: Ranks) -> list[Part]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b", "c")[: len(sizes)])
        arrangement = Arrangement(ranks, mesh)
        return [arrangement.part(n, distribute_tensor(t, mesh, placements, src_data_rank=None)) for n, t in tensors.items()]

    check_ranks(on_each_rank(math.prod(sizes), parts), tensors)


def test_a_tensor_on_some_dimensions_of_the_mesh_is_the_same_along_the_others() -> None:
    tensors = {"on shard": torch.randn(5, 3), "on tensor": torch.randn(6, 2), "plain": torch.randn(9)}

    def parts(ranks: Ranks) -> list[Part]:
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("shard", "tensor"))
        arrangement = Arrangement(ranks, mesh)
        shard = distribute_tensor(tensors["on shard"], mesh["shard"], [Shard(0)], src_data_rank=None)
        tensor = distribute_tensor(tensors["on tensor"], mesh["tensor"], [Shard(0)], src_data_rank=None)
        return [
            arrangement.part("on shard", shard),
            arrangement.part("on tensor", tensor),
            arrangement.part("plain", tensors["plain"]),
        ]

    found = on_each_rank(6, parts)
    assert [[part.copies for part in own] for own in found] == [[3, 2, 6]] * 6
    assert sorted((own[0].start[0], own[0].copy) for own in found) == [(0, 0), (0, 1), (0, 2), (3, 0), (3, 1), (3, 2)]
    check_ranks(found, tensors)


class Layers(nn.Module):
    """Tied weights, a frozen layer, a buffer, a parameter without gradient, and sizes that do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.first = nn.Linear(6, 9)
        self.frozen = nn.Linear(9, 6).requires_grad_(False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.randn(3))
        self.register_buffer("count", torch.tensor(3.0))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.frozen(self.first(self.embedding(tokens))))
        return hidden.sum()


def whole_state(seed: int) -> tuple[Layers, torch.optim.Optimizer, dict[str, Tensor]]:
    """A model and AdamW after a step, and its state by name."""
    torch.manual_seed(seed)
    model = Layers()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.arange(7)).backward()
    optimizer.step()
    alone = Arrangement(Ranks(0, 1, 0, torch.device("cpu"), None, None), None)
    parts = [*model_parts(model, alone), *optimizer_parts(optimizer, model, alone)]
    return model, optimizer, {part.name: part.local.clone() for part in parts}


def test_the_names_of_a_state() -> None:
    names = set(whole_state(0)[2])
    model = {"embedding.weight", "first.weight", "first.bias", "frozen.weight", "frozen.bias", "unused", "count"}
    trained = {"embedding.weight", "first.weight", "first.bias"}
    assert names == {f"model/{n}" for n in model} | {
        f"optimizer/{n}/{key}" for n in trained for key in ("exp_avg", "exp_avg_sq", "step")
    }


def sharded(ranks: Ranks, mesh: DeviceMesh, seed: int) -> tuple[Layers, torch.optim.Optimizer, Arrangement]:
    """`Layers` with weights of ``seed`` under ``fully_shard``; with a dimension "tensor" two layers are split along it before."""
    torch.manual_seed(seed)
    model = Layers()
    names = mesh.mesh_dim_names or ()
    if "tensor" in names:
        for layer, dimension in ((model.first, 0), (model.frozen, 1)):
            weight = distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(dimension)], src_data_rank=None)
            layer.weight = nn.Parameter(weight, requires_grad=layer.weight.requires_grad)
    data_mesh = mesh["shard"] if "tensor" in names else mesh
    for layer in (model.first, model.frozen):
        fully_shard(layer, mesh=data_mesh)
    fully_shard(model, mesh=data_mesh)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return model, optimizer, Arrangement(ranks, mesh)


MESHES = {
    "fsdp": ((4,), ("shard",)),
    "fsdp-8": ((8,), ("shard",)),  # more ranks than some tensors have rows
    "hybrid": ((2, 2), ("replicate", "shard")),
    "fsdp+tp": ((2, 2), ("shard", "tensor")),
    "fsdp+tp-8": ((4, 2), ("shard", "tensor")),  # of 9 rows the ranks have 2, 1, 2, 1, 1, 1, 0, 1
}


@pytest.mark.parametrize("case", MESHES)
def test_num_07_state_is_restored_into_shards_and_written_from_them(case: str, tmp_path: Any) -> None:
    """One rank's state into the shards of any mesh, moments included, without a step; and back into whole tensors."""
    sizes, names = MESHES[case]
    state = whole_state(0)[2]
    store = open_store(str(tmp_path))
    alone = commit_of(store, [whole(name, tensor) for name, tensor in state.items()])

    def restore(ranks: Ranks) -> list[Part]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model, optimizer, arrangement = sharded(ranks, mesh, seed=1)
        wanted = {name: kind for name, kind in kinds(alone).items() if name.startswith("optimizer/")}
        parts = [*model_parts(model, arrangement), *optimizer_targets(optimizer, model, wanted, arrangement)]
        load_into(parts, store, alone)
        moments = optimizer.state[model.first.weight]
        assert type(moments["exp_avg"]) is type(model.first.weight.data)
        assert moments["exp_avg"].placements == model.first.weight.placements
        assert moments["step"] == 1
        return parts

    found = on_each_rank(math.prod(sizes), restore)
    loads = check_ranks(found, state)
    assert max(loads) <= 2 * sum(loads) / len(loads)
    again = commit_of(store, *(to_write(own) for own in found))
    for name, tensor in read_tensors(store, again, lambda name: True).items():
        assert torch.equal(tensor, state[name]), name


def test_optimizer_state_of_what_is_not_trained_is_refused() -> None:
    model, optimizer, _ = whole_state(0)
    alone = Arrangement(Ranks(0, 1, 0, torch.device("cpu"), None, None), None)
    wanted = {f"optimizer/{name}/step": torch.empty((), device="meta") for name in ("frozen.weight", "gone", "first.bias")}
    with pytest.raises(ConfigError, match=r"optimizer state for what is not trained here: frozen\.weight, gone\.$"):
        optimizer_targets(optimizer, model, wanted, alone)


def test_boxes_that_only_touch_share_nothing() -> None:
    assert intersection(((0, 2), (0, 4)), ((2, 3), (0, 4))) is None
    assert intersection(((0, 2), (0, 4)), ((1, 3), (2, 9))) == ((1, 2), (2, 4))
    assert intersection((), ()) == ()
