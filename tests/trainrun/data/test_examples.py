"""Examples: bad lines named, tokens once, batches whose valid targets every rank knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainrun.config import ConfigError
from trainrun.data.batch import IGNORED
from trainrun.data.examples import EXAMPLES, Examples, ExamplesDescription, open_examples
from trainrun.data.examples_stream import ExampleStream
from trainrun.data.examples_write import write_examples
from trainrun.data.tokenizer import END_OF_DOCUMENT, ByteTokenizer, tokenizer_of
from trainrun.data.write import find_documents
from trainrun.ranks import Ranks


def write(folder: Path, *lines: Any, url: str | None = None) -> Examples:
    path = folder / "lines.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    url = url or str(folder / "out")
    write_examples(find_documents([str(path)]), ByteTokenizer(), url)
    return open_examples(url)


def stream(examples: Examples, *, rank: int = 0, world: int = 1, **changes: Any) -> ExampleStream:
    options = {"task": "causal", "batch_examples": 4, "sequence_length": 16, "micro_batch": 2, "seed": 0, **changes}
    return ExampleStream(examples, ranks=Ranks(rank, world, rank, torch.device("cpu"), None, None), **options)


def made(lengths: list[tuple[int, int]]) -> Examples:
    """A dataset in memory: (tokens, of them the prompt's) of each example."""
    starts = np.cumsum([0, *(length for length, _ in lengths)])
    entries = np.array([(start, *pair) for start, pair in zip(starts, lengths, strict=False)], dtype=np.int64)
    description = ExamplesDescription(
        **{"tokenizer": "bytes", "vocabulary": 257, "padding": 256, "mask": 5, "kind": "text", "classes": (), "fingerprint": "f"},
        **{"examples": len(lengths), "tokens": int(starts[-1])},
        **{"tokens_file": "", "tokens_sha256": "", "entries_file": "", "entries_sha256": ""},
    )
    return Examples("memory", description, np.arange(starts[-1], dtype=np.uint32) % 200, entries)


def described(examples: Examples, **changes: Any) -> Examples:
    return replace(examples, description=replace(examples.description, **changes))


# Writing


def test_a_completion_is_learnt_and_its_prompt_is_not(tmp_path: Path) -> None:
    examples = write(tmp_path, {"prompt": "ab", "completion": "cde"}, {"text": "xyz"})
    assert examples.tokens.tolist() == [*b"abcde", END_OF_DOCUMENT, *b"xyz", END_OF_DOCUMENT]
    data = stream(examples, batch_examples=2)
    (batch,) = data.micro_batches()
    rows = {
        bytes(row[present.bool()].tolist()): (row, target) for row, target, present in zip(*vars(batch).values(), strict=True)
    }
    assert rows[b"abcde"][1].tolist() == [IGNORED, *b"cde", END_OF_DOCUMENT]
    assert rows[b"xyz"][1].tolist() == [*b"yz", END_OF_DOCUMENT, IGNORED, IGNORED]
    assert rows[b"xyz"][0].tolist() == [*b"xyz", END_OF_DOCUMENT, END_OF_DOCUMENT]  # the end pads, and is no target there
    assert data.valid_tokens == 4 + 3


def test_classes_are_numbered_by_name_or_as_they_are(tmp_path: Path) -> None:
    named = write(tmp_path, {"text": "a", "label": "sad"}, {"text": "b", "label": "glad"}, {"text": "c", "label": "sad"})
    assert named.description.classes == ("glad", "sad")
    assert named.entries[:, 2].tolist() == [1, 0, 1]
    (tmp_path / "n").mkdir()
    numbered = write(tmp_path / "n", {"text": "a", "label": 2}, {"text": "b", "label": 0})
    assert numbered.description.classes == ("0", "1", "2")
    batch = next(stream(numbered, task="classification", batch_examples=2).micro_batches())
    assert sorted(zip(batch.inputs[:, 0].tolist(), batch.targets.tolist(), strict=True)) == [(ord("a"), 2), (ord("b"), 0)]


def test_bad_lines_are_named_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        write(
            tmp_path,
            {"text": "fine"},
            "{not json",
            {"prompt": "alone"},
            ["a", "list"],
            {"text": 7},
            {"text": ""},
            {"text": "a", "label": None},
            {"text": "a", "label": -1},
            "",
        )
    found = [problem.split("lines.jsonl, ")[1] for problem in caught.value.problems if "lines.jsonl" in problem]
    assert [problem.split(":")[0] for problem in found] == [f"line {n}" for n in (2, 3, 4, 5, 6, 7, 8)]
    for part in ("not JSON", "has prompt. Allowed", "has list", "text is 7", "text is empty", "label is null", "label is -1"):
        assert any(part in problem for problem in found), part
    with pytest.raises(ConfigError, match="1 of the 2 examples have a label"):
        write(tmp_path, {"text": "a", "label": "x"}, {"text": "b"})
    with pytest.raises(ConfigError, match="Some labels are names and some are numbers"):
        write(tmp_path, {"text": "a", "label": "x"}, {"text": "b", "label": 1})
    with pytest.raises(ConfigError, match="30 more lines are wrong") as many:
        write(tmp_path, *["nothing"] * 50)
    assert len(many.value.problems) == 21


def test_text_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(ConfigError, match=r"latin\.jsonl, line 1 or soon after: not UTF-8|line 2 or soon after: not UTF-8"):
        write_examples(find_documents([str(tmp_path / "latin.jsonl")]), ByteTokenizer(), str(tmp_path / "out"))


def test_examples_lie_in_s3_and_are_not_replaced_by_others(tmp_path: Path, bucket: str) -> None:
    url = f"s3://{bucket}/chats"
    first = write(tmp_path, {"text": "abc"}, url=url)
    assert first.tokens.tolist() == [*b"abc", END_OF_DOCUMENT]
    assert write(tmp_path, {"text": "abc"}, url=url).description == first.description
    with pytest.raises(ConfigError, match="holds another dataset"):
        write(tmp_path, {"text": "abd"}, url=url)


def test_a_changed_description_and_a_missing_one_are_errors(tmp_path: Path) -> None:
    write(tmp_path, {"text": "abc"})
    document = tmp_path / "out" / EXAMPLES
    document.write_text(document.read_text().replace('"padding": 256', '"padding": 0'))
    with pytest.raises(ConfigError, match="its fingerprint is not that of its content"):
        open_examples(str(tmp_path / "out"))
    with pytest.raises(ConfigError, match=r"examples\.json is missing.*python -m trainrun examples"):
        open_examples(str(tmp_path))


def test_hugging_face_tokenizers_mark_beginning_and_end(tmp_path: Path) -> None:
    words = tiny_models.WORDS
    llama = tokenizer_of(str(tiny_models.make_llama(tmp_path / "llama")))
    before, after = llama.continued("one plus two is", "three")
    assert [words[n] for n in before] == ["<s>", "one", "plus", "two", "is"]
    assert [words[n] for n in after] == ["three", "</s>"]
    assert (llama.vocabulary, words[llama.padding], llama.mask) == (len(words), "</s>", -1)
    bert = tokenizer_of(str(tiny_models.make_bert(tmp_path / "bert")))
    assert [words[n] for n in bert.whole("the film")] == ["[CLS]", "the", "film", "[SEP]"]
    assert (words[bert.padding], words[bert.mask]) == ("[PAD]", "[MASK]")
    assert llama.name != bert.name
    with pytest.raises(ConfigError, match="There is no folder"):
        tokenizer_of(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="has no tokenizer that transformers can load"):
        tokenizer_of(str(tmp_path / "empty"))


# Reading

LENGTHS = [(3 + n % 14, n % 5) for n in range(27)]


def test_survey_37_every_rank_knows_the_valid_targets_of_the_whole_step() -> None:
    """Prompts, padding and cuts leave every micro-batch another number; their sum is what each rank was told before."""
    for world in (1, 2, 4):
        streams = [stream(made(LENGTHS), rank=rank, world=world) for rank in range(world)]
        for _ in range(9):
            told = {data.valid_tokens for data in streams}
            counted = sum(int((batch.targets != IGNORED).sum()) for data in streams for batch in data.micro_batches())
            assert told == {counted}
            for data in streams:
                data.advance()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 40), st.integers(0, 40)).map(lambda p: (max(p[0], 1), min(p[1], p[0]))), min_size=1, max_size=12
    ),
    st.sampled_from(["causal", "masked"]),
    st.integers(2, 20),
)
def test_what_is_counted_beforehand_is_what_is_given(lengths: list[tuple[int, int]], task: str, sequence_length: int) -> None:
    try:
        data = stream(made(lengths), task=task, batch_examples=2, sequence_length=sequence_length)
    except ConfigError as error:
        assert "has anything to learn" in str(error)
        return
    for _ in range(3):
        told, counted = data.valid_tokens, 0
        for batch in data.micro_batches():
            assert batch.inputs.shape == batch.targets.shape == batch.present.shape
            assert 1 <= batch.inputs.shape[1] <= sequence_length
            assert (batch.targets[batch.present == 0] == IGNORED).all()
            counted += int((batch.targets != IGNORED).sum())
        assert told == counted > 0
        data.advance()


def test_any_world_reads_the_same_examples_and_resumes() -> None:
    def seen(data: ExampleStream) -> list[int]:
        rows = [int(row[0]) for batch in data.micro_batches() for row in batch.inputs]
        data.advance()
        return rows

    alone = stream(made(LENGTHS))
    whole = [seen(alone) for _ in range(20)]
    for world in (2, 4):
        parts = [stream(made(LENGTHS), rank=rank, world=world) for rank in range(world)]
        assert [[row for part in parts for row in seen(part)] for _ in range(5)] == whole[:5]
    state = {**alone.state(), "position": 4 * 7}
    resumed = stream(made(LENGTHS), rank=1, world=2)
    resumed.load_state(state)
    assert [seen(resumed) for _ in range(3)] == [step[2:] for step in whole[7:10]]
    for change in ({"task": "masked"}, {"sequence_length": 8}, {"seed": 1}):
        with pytest.raises(ConfigError, match="the order of the data would not go on"):
            stream(made(LENGTHS), **change).load_state(state)


def test_every_epoch_masks_other_words_but_every_world_the_same() -> None:
    examples = made([(42, 0)] * 2)

    def masked(position: int, rank: int = 0, world: int = 1) -> torch.Tensor:
        data = stream(examples, task="masked", batch_examples=2, sequence_length=40, rank=rank, world=world)
        data.position = position
        return torch.cat([batch.targets for batch in data.micro_batches()])

    first = masked(0)
    assert first.shape == (2, 40)
    assert ((first != IGNORED).sum(1) == 6).all()  # 15% of 38
    assert (first[:, [0, -1]] == IGNORED).all()
    assert torch.equal(torch.cat([masked(0, 0, 2), masked(0, 1, 2)]), first)
    assert not torch.equal(masked(2), first)


def test_masked_words_are_hidden_four_times_in_five() -> None:
    data = stream(made([(402, 0)] * 8), task="masked", batch_examples=8, micro_batch=8, sequence_length=402)
    (batch,) = data.micro_batches()
    guessed = batch.targets != IGNORED
    hidden = (batch.inputs == 5) & guessed
    kept = (batch.inputs == batch.targets) & guessed
    assert guessed.sum() == 8 * 60
    assert 0.72 < hidden.sum() / guessed.sum() < 0.88
    assert 0.05 < kept.sum() / guessed.sum() < 0.17


def test_cuts_are_told_and_examples_without_anything_to_learn_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    examples = made([(10, 2), (40, 3), (40, 30)])
    data = stream(examples, batch_examples=2)
    told = capsys.readouterr().err
    assert "2 of 3 examples at memory are longer than 17 tokens and are cut" in told
    assert "WARNING: 1 of 3 examples at memory have nothing to learn within 16 tokens" in told
    assert data.valid_tokens == (10 - 2) + (17 - 3)
    stream(examples, batch_examples=2, rank=1, world=2)
    assert not capsys.readouterr().err  # once for all ranks
    with pytest.raises(ConfigError, match="None of the 1 examples at memory has anything to learn within 16 tokens"):
        stream(made([(40, 30)]))


def test_classification_keeps_the_end_of_a_text_that_is_cut() -> None:
    examples = made([(30, 0)])
    data = stream(described(examples, kind="labelled"), task="classification", batch_examples=1, sequence_length=8)
    assert next(data.micro_batches()).inputs.tolist() == [[0, 1, 2, 3, 4, 5, 6, 29]]
    assert data.valid_tokens == 1


def test_a_sample_is_of_the_longest() -> None:
    data = stream(made([(3, 0), (12, 0), (5, 0)]))
    assert data.sample(3).inputs.shape == (3, 11)
    assert data.position == 0


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"have no classes, so finetune\.task cannot be 'classification'"):
        stream(made(LENGTHS), task="classification")
    with pytest.raises(ConfigError, match="no mask token"):
        stream(described(made(LENGTHS), mask=-1), task="masked")
    with pytest.raises(ConfigError, match=r"A batch of 4 examples does not divide among 3 ranks.*1, 2, 4.*batch_examples to 3"):
        stream(made(LENGTHS), world=3)
