"""Whatever stands in COMMIT, descriptions and shards: a restore gives the tensors that were written, or says that it does not."""

from __future__ import annotations

import copy
import hashlib
import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainrun.checkpoint.layout import Commit, Damaged, Entry, Shard, commit_key, parse_commit, parse_shard, shard_key
from trainrun.checkpoint.parts import Part, whole
from trainrun.checkpoint.read import kinds, lacking, load_into
from trainrun.directory import DirectoryStore
from trainrun.errors import CheckpointError

STEP = 3
TENSORS = {
    "model/a": torch.arange(24.0).reshape(4, 6),
    "model/b": torch.arange(7, dtype=torch.int64),
    "optimizer/a/exp_avg": torch.full((4, 6), 0.5),
    "optimizer/a/step": torch.tensor(3.0),
}


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def make() -> tuple[Commit, dict[str, bytes]]:
    """A checkpoint of two ranks that have half of each matrix, and its shards."""
    shards, objects = [], {}
    for rank in range(2):
        content, entries = b"", {}
        for name, tensor in TENSORS.items():
            shape = tuple(tensor.shape)
            if shape == (4, 6):
                box: tuple[tuple[int, int], ...] = ((2 * rank, 2 * rank + 2), (0, 6))
                tensor = tensor[2 * rank : 2 * rank + 2]
            elif rank == 0:
                box = tuple((0, size) for size in shape)
            else:
                continue
            data = data_of(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            digest = hashlib.sha256(data).hexdigest()
            entries[name] = (Entry(offset=len(content), length=len(data), dtype=dtype, shape=shape, slice=box, sha256=digest),)
            content += data
        key = shard_key(STEP, "a", rank)
        objects[key] = content
        values = {f"rng/{rank}/python": [3, None]}
        shards.append(
            Shard(key=key, length=len(content), sha256=hashlib.sha256(content).hexdigest(), tensors=entries, values=values)
        )
    commit = Commit(
        **{"run": "run", "step": STEP, "tokens": 5, "attempt": "a", "time": 1.5, "world": 2, "mesh": {"shard": 2}},
        **{"data": {"position": 7}, "settings": {"steps": 3}, "versions": {"torch": "2"}, "shards": tuple(shards)},
    )
    return commit, objects


COMMIT, OBJECTS = make()
TEXT = COMMIT.to_json()
DOCUMENT = json.loads(TEXT)
WRITTEN = parse_commit(TEXT, STEP)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> DirectoryStore:
    store = DirectoryStore(tmp_path_factory.mktemp("store"))
    for key, data in OBJECTS.items():
        store.put(key, data)
    return store


def sealed(document: dict[str, Any]) -> str:
    """With the digest of its own content: what a hostile or faulty writer would leave."""
    content = {key: value for key, value in document.items() if key != "sha256"}
    return json.dumps({**content, "sha256": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()})


def restored(store: DirectoryStore, commit: Commit) -> dict[str, torch.Tensor]:
    targets: list[Part] = [whole(name, torch.zeros_like(tensor)) for name, tensor in TENSORS.items()]
    load_into(targets, store, commit)
    return {part.name: part.local for part in targets}


@st.composite
def harmed(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with some flipped, cut off, put in, repeated, or others altogether."""
    kind = draw(st.sampled_from(["flip", "cut", "put in", "repeat", "random", "zero"]))
    at = draw(st.integers(0, len(data) - 1))
    if kind == "flip":
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if kind == "cut":
        return data[:at]
    if kind == "put in":
        return data[:at] + draw(st.binary(min_size=1, max_size=20)) + data[at:]
    if kind == "repeat":
        return data[:at] + data[at : at + 40] + data[at:]
    if kind == "zero":
        return data[:at] + bytes(len(data) - at)
    return draw(st.binary(max_size=200))


@settings(max_examples=300, deadline=None)
@given(harmed(TEXT.encode()))
def test_a_harmed_commit_is_damage_or_says_the_same(data: bytes) -> None:
    try:
        commit = parse_commit(data.decode(errors="replace"), STEP)
    except Damaged:
        return
    assert commit == WRITTEN


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(OBJECTS)), st.data())
def test_harmed_shards_are_damage_or_the_same_tensors(store: DirectoryStore, key: str, data: st.DataObject) -> None:
    harm = data.draw(harmed(OBJECTS[key]))
    try:
        store.put(key, harm)
        assert (lacking(store, WRITTEN) is not None) == (len(harm) != len(OBJECTS[key]))
        try:
            found = restored(store, WRITTEN)
        except Damaged as error:
            assert key in str(error)
            return
        assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    finally:
        store.put(key, OBJECTS[key])


@settings(max_examples=200, deadline=None)
@given(harmed(COMMIT.shards[0].to_json().encode()))
def test_a_harmed_description_is_damage_or_a_shard(data: bytes) -> None:
    try:
        shard = parse_shard(data.decode(errors="replace"), "rank-00000.json")
    except Damaged:
        return
    assert isinstance(shard, Shard)
    assert all(isinstance(entry, Entry) for entries in shard.tensors.values() for entry in entries)


def test_a_description_says_what_was_written() -> None:
    assert parse_shard(COMMIT.shards[0].to_json(), "x") == COMMIT.shards[0]


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(
        [0, 1, -1, 2, 2**31, 2**63, 10**12, 10**40, 0.5, float("nan"), float("inf"), "", "../../x", "/etc", "object"]
    )
    | st.integers()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to all values in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


PLACES = [place for place in places(DOCUMENT) if place]


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=3))
def test_a_hostile_commit_gives_no_bytes_but_those_of_its_own_shards(
    store: DirectoryStore, changes: list[tuple[tuple[Any, ...], Any]]
) -> None:
    document = copy.deepcopy(DOCUMENT)
    for path, value in changes:
        place = document
        try:
            for key in path[:-1]:
                place = place[key]
            if path[-1] in place or isinstance(place, list):
                place[path[-1]] = value
        except (IndexError, KeyError, TypeError):
            continue  # gone by a change before
    try:
        commit = parse_commit(sealed(document), STEP)
        found = restored(store, commit)
    except (Damaged, CheckpointError):
        return
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def claim(change: Callable[[dict[str, Any]], None]) -> str:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return sealed(document)


def huge(document: dict[str, Any]) -> None:
    """A tensor of 4 TB, in a shard that says it has as much."""
    shard = document["shards"][1]
    length = 4 * 10**12
    shard["tensors"]["rng/0/torch"] = [
        {
            **{"offset": shard["length"], "length": length, "dtype": "float32", "shape": [10**12], "slice": [[0, 10**12]]},
            "sha256": "0" * 64,
        }
    ]
    shard["length"] += length


def test_a_claim_of_terabytes_takes_no_memory(store: DirectoryStore) -> None:
    tracemalloc.start()
    try:
        commit = parse_commit(claim(huge), STEP)
        assert kinds(commit)["rng/0/torch"].shape == (10**12,)
        assert "has 48 bytes" not in str(lacking(store, commit))
        assert "not the 4000000000" in str(lacking(store, commit))
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 100_000, "is not JSON"),
        (f'{{"shards": {"9" * 5000}}}', "is not JSON"),
        ("NaN", "is not a COMMIT: the whole is no dict, but float"),
        (claim(lambda d: d["shards"].append(d["shards"][0])), "2 ranks wrote 3 shards"),
        (claim(lambda d: d["shards"].__setitem__(1, d["shards"][0])), "two of its shards are the same"),
        (claim(lambda d: d["shards"][0]["tensors"]["model/b"][0].update(offset=8)), "slices share bytes of"),
        (claim(lambda d: d["shards"][1].update(key="step-000000003/a/../../../../etc/passwd")), "is not one of this attempt"),
        (claim(lambda d: d["shards"][1]["tensors"]["model/a"][0].update(slice=[[1, 3], [0, 6]])), "do not make up a whole"),
        (claim(lambda d: d["shards"][1]["tensors"]["model/a"][0].update(shape=[4, 6.0])), "has a field of a wrong type"),
        (claim(lambda d: d["shards"][1]["tensors"]["model/a"][0].update(pickle="x")), "has other fields than"),
        (claim(lambda d: d.update(time=float("nan"))), "at the time nan"),
        (claim(lambda d: d.update(tokens=float("inf"))), "tokens must be a whole number"),
    ],
    ids=range(13),
)
def test_num_09_hostile_commits_are_damage(text: str, told: str) -> None:
    with pytest.raises(Damaged, match=told):
        parse_commit(text, STEP)


def test_of_a_key_that_is_there_twice_the_digest_decides() -> None:
    with pytest.raises(Damaged, match="sha256 differs"):
        parse_commit(TEXT.rstrip().removesuffix("}") + ', "step": 3, "tokens": 6}', STEP)


def test_a_step_has_one_key(store: DirectoryStore) -> None:
    from trainrun.checkpoint.layout import committed_steps

    other = store.child("other")
    for key in (
        commit_key(3),
        "step-0000000004/COMMIT.json",
        "step-00000005/COMMIT.json",
        "step-\u0660\u0661\u0662345678/COMMIT.json",
    ):
        other.put(key, b"x")
    assert committed_steps(other) == [3]
