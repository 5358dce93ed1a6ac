"""Datasets: written the same everywhere, checked when read, fetched once per node."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from trainrun.config import ConfigError
from trainrun.data import cache
from trainrun.data.dataset import HELD_OUT, TRAIN, open_dataset
from trainrun.data.stream import TokenStream
from trainrun.data.tokenizer import decode, encode, tokenizer_of
from trainrun.data.write import find_documents, write_dataset
from trainrun.ranks import Ranks
from trainrun.store import StoreError, open_store


def write(corpus: Path, url: str, **options: Any) -> Any:
    return write_dataset(find_documents([str(corpus)]), url, **options)


def test_every_byte_of_every_file_is_there_once(corpus: Path, dataset: str) -> None:
    opened = open_dataset(dataset)
    texts = []
    for name in (TRAIN, HELD_OUT):
        tokens, split = opened.tokens(name), opened.split(name)
        assert len(tokens) == split.tokens == split.bytes + split.documents
        texts += decode(tokens.tolist()).split("\f")[:-1]
    assert sorted(texts) == sorted(path.read_text() for path in corpus.iterdir())
    held_out = opened.split(HELD_OUT).bytes / sum(path.stat().st_size for path in corpus.iterdir())
    assert 0.2 <= held_out < 0.31


def test_any_bytes_survive() -> None:
    assert decode(encode(b"caf\xc3\xa9\x00\n").tolist()) == "café\x00\n"
    assert decode(encode(b"\xff").tolist()) == "\N{REPLACEMENT CHARACTER}"
    assert decode([97, 257, 128255]) == "a" + 2 * "\N{REPLACEMENT CHARACTER}"  # a model may have more rows than the data need


def test_the_same_files_give_the_same_bytes_wherever_they_lie(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "elsewhere")
    write(corpus, str(tmp_path / "a"))
    write(tmp_path / "elsewhere", str(tmp_path / "b"))
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b
    assert len(a) == 3


def test_at_byte_level_the_dataset_is_what_it_always_was(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a").write_bytes(b"caf\xc3\xa9\xff")
    (tmp_path / "texts/b").write_bytes(b"")
    description = write(tmp_path / "texts", str(tmp_path / "d"), held_out=0)
    assert open_dataset(str(tmp_path / "d")).tokens(TRAIN).tolist() == [*b"caf\xc3\xa9\xff", 256, 256]
    assert description.fingerprint == "bcb9d733af5ec191a4d3a22c024e5bd5faa3ae61d932c903128e85b1e66126dd"


def texts_of_words(folder: Path) -> Path:
    (folder / "texts").mkdir()
    (folder / "texts/a").write_text("the film is good")
    (folder / "texts/b").write_text("w70000 plus w1")
    return folder / "texts"


@pytest.mark.parametrize(("more", "dtype"), [(2**16 - 24, "uint16"), (2**16 - 23, "uint32"), (70_001, "uint32")])
def test_a_tokenizer_of_hugging_face_ends_each_document_and_sets_the_width(tmp_path: Path, more: int, dtype: str) -> None:
    tokenizer = tokenizer_of(str(tiny_models.make_tokenizer(tmp_path / "t", more=more)))
    texts = texts_of_words(tmp_path)
    one, two = (write(texts, str(tmp_path / name), tokenizer=tokenizer, held_out=0) for name in ("one", "two"))
    assert one == two
    assert (one.tokenizer, one.vocabulary, one.dtype) == (tokenizer.name, len(tiny_models.WORDS) + more, dtype)
    tokens = open_dataset(str(tmp_path / "one")).tokens(TRAIN)
    assert tokens.dtype == dtype
    word = {word: number for number, word in enumerate(tiny_models.WORDS)}
    last = len(word) + 70_000 if more == 70_001 else word["[UNK]"]
    a = [word[w] for w in ("<s>", "the", "film", "is", "good", "</s>")]
    b = [word["<s>"], last, word["plus"], len(word) + 1, word["</s>"]]
    assert tokens.tolist() == a + b
    split = one.splits[TRAIN]
    assert (split.tokens, split.documents, split.bytes) == (11, 2, len("the film is good" + "w70000 plus w1"))
    assert write(texts, str(tmp_path / "bytes"), held_out=0).fingerprint != one.fingerprint


def test_the_stream_reads_ids_beyond_16_bits(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(str(tiny_models.make_tokenizer(tmp_path / "t", more=70_001)))
    description = write(texts_of_words(tmp_path), str(tmp_path / "d"), tokenizer=tokenizer, held_out=0)
    data = TokenStream(
        open_dataset(str(tmp_path / "d")).tokens(TRAIN),
        vocabulary=description.vocabulary,
        fingerprint=description.fingerprint,
        tokenizer=description.tokenizer,
        **{"batch_tokens": 10, "sequence_length": 10, "micro_batch": 1, "seed": 0},
        ranks=Ranks(0, 1, 0, torch.device("cpu"), None, None),
    )
    (batch,) = data.micro_batches()
    assert batch.inputs.dtype == torch.int64
    assert batch.inputs.max().item() == len(tiny_models.WORDS) + 70_000 < data.vocabulary
    assert data.state()["tokenizer"] == tokenizer.name


def test_tokenizers_without_an_end_and_texts_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    texts = texts_of_words(tmp_path)
    without_end = tokenizer_of(str(tiny_models.make_bert(tmp_path / "bert")))
    with pytest.raises(ConfigError, match="has no eos_token, so that nothing would end a document"):
        write(texts, str(tmp_path / "d"), tokenizer=without_end)
    (texts / "latin").write_bytes(b"caf\xe9")
    tokenizer = tokenizer_of(str(tiny_models.make_tokenizer(tmp_path / "t")))
    with pytest.raises(ConfigError, match=r"latin is not UTF-8 \(byte 3\)"):
        write(texts, str(tmp_path / "d"), tokenizer=tokenizer, held_out=0)
    assert not (tmp_path / "d").exists()


def test_what_is_there_already_is_the_same_or_an_error(corpus: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "d")
    assert write(corpus, url) == write(corpus, url)
    with pytest.raises(ConfigError, match="holds another dataset"):
        write(corpus, url, held_out=0.5)


def test_patterns_pick_files(tmp_path: Path) -> None:
    for name in ("a.py", "b.txt", "deep/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [d.name for d in find_documents([str(tmp_path)], pattern="*.py")] == ["0/a.py"]
    assert [d.name for d in find_documents([str(tmp_path)], pattern="**/*.py")] == ["0/a.py", "0/deep/c.py"]
    assert [d.name for d in find_documents([str(tmp_path / "b.txt"), str(tmp_path / "deep")])] == ["0/b.txt", "1/c.py"]
    with pytest.raises(ConfigError, match="No text was found"):
        find_documents([str(tmp_path)], pattern="*.md")
    with pytest.raises(ConfigError, match="does not exist"):
        find_documents([str(tmp_path / "nowhere")])


def test_splits_that_leave_nothing_are_errors(tmp_path: Path) -> None:
    (tmp_path / "only").write_text("text")
    with pytest.raises(ConfigError, match="leaves none to train on"):
        write(tmp_path, str(tmp_path / "d"))
    assert list(write(tmp_path, str(tmp_path / "d"), held_out=0).splits) == [TRAIN]
    with pytest.raises(ConfigError, match="has no split 'held-out'"):
        open_dataset(str(tmp_path / "d")).split(HELD_OUT)
    with pytest.raises(ConfigError, match=r"Allowed: 0 \(none\) to less than 1"):
        write(tmp_path, str(tmp_path / "e"), held_out=1.5)


def test_what_is_no_dataset_is_refused(tmp_path: Path, dataset: str) -> None:
    with pytest.raises(ConfigError, match="There is no dataset at"):
        open_dataset(str(tmp_path))
    with pytest.raises(ConfigError, match="No data is named"):
        open_dataset("")
    shutil.copytree(dataset, tmp_path / "d")
    description = json.loads((tmp_path / "d/dataset.json").read_text())
    (tmp_path / "d/dataset.json").write_text(json.dumps({**description, "vocabulary": 300}))
    with pytest.raises(ConfigError, match="was changed"):
        open_dataset(str(tmp_path / "d"))
    (tmp_path / "d/dataset.json").write_text(json.dumps({**description, "schema": 2}))
    with pytest.raises(ConfigError, match="has schema 2"):
        open_dataset(str(tmp_path / "d"))


def test_a_file_of_another_length_is_refused(tmp_path: Path, dataset: str) -> None:
    shutil.copytree(dataset, tmp_path / "d")
    opened = open_dataset(str(tmp_path / "d"))
    path = tmp_path / "d" / opened.split(TRAIN).file
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(ConfigError, match="its description says"):
        opened.tokens(TRAIN)


def test_from_s3_a_file_comes_to_the_node_once(
    corpus: Path, bucket: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path / "cache"))
    written = write(corpus, f"s3://{bucket}/text")
    s3.requests.clear()
    found: list[bytes] = []
    readers = [
        threading.Thread(target=lambda: found.append(open_dataset(f"s3://{bucket}/text").tokens(TRAIN).tobytes()))
        for _ in range(4)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(30)
    assert len(found) == 4
    assert len(set(found)) == 1
    assert sum(request.startswith(f"GET /{bucket}/text/{written.splits[TRAIN].file}") for request in s3.requests) == 1


def test_a_damaged_download_is_refused_and_not_kept(
    corpus: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path / "cache"))
    file = write(corpus, f"s3://{bucket}/text").splits[TRAIN].file
    store = open_store(f"s3://{bucket}/text")
    good = store.get(file)
    store.put(file, good[:-1] + b"\x07")
    with pytest.raises(StoreError, match="is damaged"):
        open_dataset(f"s3://{bucket}/text").tokens(TRAIN)
    store.put(file, good)
    assert open_dataset(f"s3://{bucket}/text").tokens(TRAIN).tobytes() == good


def _hold_lock(path: Path, held: Any) -> None:
    file = path.open("w")
    fcntl.flock(file, fcntl.LOCK_EX)
    held.set()
    threading.Event().wait()


def test_data_10_a_killed_download_stops_nobody(
    corpus: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINRUN_CACHE", str(tmp_path))
    split = write(corpus, f"s3://{bucket}/text").splits[TRAIN]
    (tmp_path / f"{split.sha256}.partial").write_bytes(b"half a file")
    context = multiprocessing.get_context("fork")
    held = context.Event()
    holder = context.Process(target=_hold_lock, args=(tmp_path / f"{split.sha256}.lock", held), daemon=True)
    holder.start()
    assert held.wait(10)
    holder.kill()
    holder.join()
    tokens = open_dataset(f"s3://{bucket}/text").tokens(TRAIN)
    assert len(tokens) == split.tokens
    assert tokens.dtype == np.uint16


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINRUN_CACHE", raising=False)
    monkeypatch.setenv("TRAINRUN_STATE", "/state")
    assert cache.cache_directory() == Path("/state/cache")
    monkeypatch.setenv("TRAINRUN_CACHE", "/cache")
    assert cache.cache_directory() == Path("/cache")
