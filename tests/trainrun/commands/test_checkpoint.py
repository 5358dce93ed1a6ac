"""``trainrun checkpoint``: what each verb finds, writes, refuses, and its exit codes."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trainrun.__main__ import main
from trainrun.checkpoint.compare import largest_difference
from trainrun.checkpoint.convert import convert
from trainrun.checkpoint.export import export
from trainrun.checkpoint.foreign import Foreign
from trainrun.checkpoint.layout import Commit, commit_key, new_attempt, read_commit, shard_key, step_directory
from trainrun.checkpoint.parts import whole
from trainrun.checkpoint.tensors import model_tensors
from trainrun.config import to_mapping
from trainrun.data.tokenizer import tokenizer_of
from trainrun.models.gpt import GPT
from trainrun.settle import settle
from trainrun.store import Store, open_store

Run = Any
"""The `run` fixture: runs a command line and returns its exit code, stdout and stderr."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *arguments])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


def write(store: Store, step: int, tensors: dict[str, Tensor], *settings: str, shard: int = 2**30) -> Commit:
    """A committed checkpoint, in several shards where one would have more than ``shard`` bytes."""
    source = Foreign(format="test", step=step, bytes=0, parts=iter([whole(name, tensor) for name, tensor in tensors.items()]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainrun.checkpoint.convert.SHARD_SIZE", shard)
        return convert(source, store, settings=to_mapping(settle(None, list(settings)))).commit


def some(seed: int = 0) -> dict[str, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return {f"model/{name}": torch.randn(8, 5, generator=source) for name in "abcd"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A run's folder with steps 100, 200 and 1000, of four shards each."""
    store = open_store(str(tmp_path / "run"))
    for step in (100, 200, 1000):
        write(store, step, some(step), "--strategy=fsdp2", shard=200)
    return store


def flip(store: Store, commit: Commit, shard: int = 0) -> str:
    """Change a bit of the first tensor of a shard, and return its name."""
    key = commit.shards[shard].key
    data = bytearray(store.get(key))
    name, (entry,) = next(iter(commit.shards[shard].tensors.items()))
    data[entry.offset + 7] ^= 4
    store.put(key, bytes(data))
    return name


# ls and verify


def test_ls_tells_what_is_there_and_what_it_did_not_look_at(store: Store, run: Run) -> None:
    store.put(shard_key(300, new_attempt(), 0), b"being written")
    store.put(f"{step_directory(100)}/DAMAGED-x.json", b"evidence")
    code, out, err = run("ls", store.url)
    assert code == 0
    assert re.findall(r"step +(\d+) ", out) == ["100", "100", "200", "300", "1000"]
    assert re.search(r"step +1000 +0:0\d +\d+ B .* tokens  4 ranks x fsdp2\n", out)
    assert "set aside" in out
    assert "incomplete  attempt" in out
    assert "verified" not in out
    assert "their content was not read" in err

    flip(store, read_commit(store, 200))
    code, out, _ = run("ls", store.url, "--json")
    rows = {(row["step"], row["status"]): row for row in json.loads(out)}
    assert code == 0  # nobody has read the bytes
    assert rows[200, "committed"]["verified"] is None
    assert rows[200, "committed"]["bytes"] == read_commit(store, 200).bytes
    assert rows[200, "committed"]["strategy"] == "fsdp2"
    assert rows[300, "incomplete"]["bytes"] == len(b"being written")
    code, out, err = run("ls", store.url, "--verify")
    assert code == 1
    assert out.count("verified") == 2
    assert "DAMAGED: 1 tensor not as written, such as model/a" in out
    assert not err


def test_ckpt_04_ls_sees_shards_that_are_missing_or_cut_off_without_reading_them(store: Store, run: Run) -> None:
    first, second = (read_commit(store, step).shards[1].key for step in (100, 200))
    store.delete([first])
    store.put(second, store.get(second)[:-1])
    code, out, _ = run("ls", store.url, "--json")
    assert code == 1
    damage = {row["step"]: row.get("damage") for row in json.loads(out)}
    assert damage == {100: f"{first} is missing", 200: f"{second} has 159 bytes instead of 160", 1000: None}


def test_the_metric_that_was_recorded_is_shown(store: Store, run: Run) -> None:
    commit = read_commit(store, 200)
    store.put(commit_key(200), replace(commit, metric=2.25).to_json().encode())
    assert "metric 2.25" in run("ls", store.url)[1]
    assert [row["metric"] for row in json.loads(run("ls", store.url, "--json")[1])] == [None, 2.25, None]


def test_verify_names_every_damaged_tensor(store: Store, run: Run) -> None:
    assert run("verify", store.url)[:2] == (0, "step      1000  verified, 640 B read\n")
    commit = read_commit(store, 200)
    names = sorted([flip(store, commit, 0), flip(store, commit, 2)])
    code, out, _ = run("verify", store.url, "200")
    assert code == 1
    assert out.startswith("step       200  DAMAGED: 2 tensors not as written\n")
    assert re.findall(r"^  (\S+): step-000000200/\S+/rank-0000[02]\.bin$", out, re.MULTILINE) == names
    store.delete([commit.shards[1].key])
    store.put(commit_key(100), b"{}")
    code, out, _ = run("verify", store.url, "--all", "--json")
    assert code == 1
    first, second, third = json.loads(out)
    assert [result["verified"] for result in (first, second, third)] == [False, False, True]
    assert "COMMIT.json" in first["problems"][0]
    assert second["problems"] == [f"{store.locate(commit.shards[1].key)} is missing"]
    assert sorted(second["tensors"]) == sorted([*names, *commit.shards[1].tensors])
    assert third["bytes"] == 640


def test_what_cannot_be_verified_is_not_called_damaged(store: Store, run: Run, tmp_path: Path) -> None:
    assert run("verify", store.url, "150")[0] == 2
    assert "There is no checkpoint of step 150" in run("verify", store.url, "150")[2]
    assert "There are: 100, 200, 1000." in run("verify", store.url, "150")[2]
    assert 'Write its number, or "latest"' in run("verify", store.url, "newest")[2]
    assert run("verify", str(tmp_path / "none"))[0] == 2
    assert run("verify", str(tmp_path / "none"), "--all")[0] == 2
    with pytest.raises(SystemExit) as refused:
        run("verify", store.url, "100", "--all")
    assert refused.value.code == 2


@pytest.mark.parametrize("verb", ["ls", "verify", "export", "convert", "prune", "diff"])
def test_help_documents_exit_codes(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoint", verb, "--help"])
    assert re.search(r"Exit\s+code:\s+0\s+when", capsys.readouterr().out)


def test_verbs_work_on_s3_and_read_in_parallel(bucket: str, run: Run, tmp_path: Path) -> None:
    url = f"s3://{bucket}/runs/run"
    store = open_store(url)
    for step in (1, 2, 3):
        write(store, step, some(step), shard=200)
    assert run("ls", url, "--verify")[1].count("verified") == 3
    assert run("prune", url, "--keep", "2", "--yes")[0] == 0
    assert run("export", url, "latest", f"s3://{bucket}/exported", "--max-shard-size", "0.3KB")[0] == 0
    keys = [item.key for item in open_store(f"s3://{bucket}/exported").list()]
    assert keys == [*(f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)), "model.safetensors.index.json"]
    assert run("export", url, "2", f"s3://{bucket}/exported")[0] == 2
    assert run("diff", f"{url}@2", f"{url}@3")[0] == 1
    flip(store, read_commit(store, 3))
    assert run("verify", url)[0] == 1
    assert run("export", url, "latest", str(tmp_path / "out"))[0] == 1
    assert not (tmp_path / "out").exists()


# export

LLAMA = [
    *("--model.preset=llama3.2-1b", "--model.layers=2", "--model.width=32", "--model.heads=4", "--model.kv_heads=2"),
    *("--model.feed_forward=48", "--model.vocabulary=300", "--sequence_length=24", "--batch_tokens=48"),
]


def gpt_of(*settings: str) -> GPT:
    torch.manual_seed(1)
    resolved = settle(None, list(settings))
    gpt = GPT(resolved.model, vocabulary=257, context=resolved.sequence_length)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return gpt.eval()


@pytest.mark.parametrize("tied", ["true", "false"])
@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_an_exported_llama_computes_in_transformers_what_it_computes_here(
    tied: str, dtype: str, tmp_path: Path, run: Run
) -> None:
    arguments = [*LLAMA, f"--model.tied={tied}"]
    gpt, store, out = gpt_of(*arguments), open_store(str(tmp_path / "run")), tmp_path / "out"
    commit = write(store, 3, model_tensors(gpt), *arguments, shard=5000)
    store.put(commit_key(3), replace(commit, data={"sequence_length": 24, "tokenizer": "bytes"}).to_json().encode())
    more = ["--dtype", dtype] if dtype else []
    code, printed, err = run("export", store.url, "latest", str(out), "--max-shard-size", "20KB", *more)
    assert (code, printed) == (0, f"The model of step 3 was written to {out}.\n")
    assert "a token is a byte, and 256 ends a text" in err
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2
    assert sorted(set(index["weight_map"].values())) == files
    assert ("lm_head.weight" in index["weight_map"]) == (tied == "false")
    assert not list(out.glob(".*"))

    llama = AutoModelForCausalLM.from_pretrained(out)
    assert llama.dtype == (torch.bfloat16 if dtype else torch.float32)
    assert llama.config.eos_token_id == 256
    if dtype:
        for parameter in gpt.parameters():
            parameter.data = parameter.data.bfloat16().float()
    tokens = torch.randint(300, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(llama.float()(tokens).logits, gpt(tokens), atol=1e-5, rtol=0)


def test_the_tokenizer_of_the_data_goes_along_and_another_is_refused(tmp_path: Path, run: Run) -> None:
    gpt, store = gpt_of(*LLAMA), open_store(str(tmp_path / "run"))
    commit = write(store, 3, model_tensors(gpt), *LLAMA)
    tokenizer = tiny_models.make_tokenizer(tmp_path / "tokenizer")
    assert "Give it with --tokenizer" in run("export", store.url, "3", str(tmp_path / "unknown"))[2]
    assert json.loads((tmp_path / "unknown/config.json").read_text())["eos_token_id"] is None
    data = {"sequence_length": 20, "tokenizer": tokenizer_of(str(tokenizer)).name}
    store.put(commit_key(3), replace(commit, data=data).to_json().encode())
    assert "Give it with --tokenizer" in run("export", store.url, "3", str(tmp_path / "without"))[2]
    assert run("export", store.url, "3", str(tmp_path / "with"), "--tokenizer", str(tokenizer))[0] == 0
    AutoTokenizer.from_pretrained(tmp_path / "with")
    config = json.loads((tmp_path / "with/config.json").read_text())
    assert (config["max_position_embeddings"], config["eos_token_id"]) == (20, tiny_models.WORDS.index("</s>"))
    other = tiny_models.make_tokenizer(tmp_path / "other", more=1)
    code, _, err = run("export", store.url, "3", str(tmp_path / "wrong"), "--tokenizer", str(other))
    assert code == 2
    assert "was trained on tokens of sha256:" in err
    assert not (tmp_path / "wrong").exists()


def tuned(folder: Path, kind: Any) -> dict[str, Tensor]:
    """A model of transformers as `trainrun.finetune` saves it."""
    outer = nn.Module()
    outer.model = kind
    return model_tensors(outer)


def test_a_fine_tuned_model_gets_the_configuration_that_it_came_with(tmp_path: Path, run: Run) -> None:
    folder, store = tiny_models.make_llama(tmp_path / "llama"), open_store(str(tmp_path / "run"))
    llama = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        llama.lm_head.weight.mul_(2)
    write(store, 4, tuned(folder, llama), f"--finetune.model={folder}")
    assert run("export", store.url, "latest", str(tmp_path / "out"))[0] == 0
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for (name, ours), theirs in zip(again.named_parameters(), llama.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
    AutoTokenizer.from_pretrained(tmp_path / "out")
    folder.rename(tmp_path / "moved")
    assert "Give --model" in run("export", store.url, "latest", str(tmp_path / "bare"))[2]
    assert not (tmp_path / "bare/config.json").exists()
    assert run("export", store.url, "latest", str(tmp_path / "bare"), "--force", "--model", str(tmp_path / "moved"))[0] == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "bare")


def test_a_classifier_has_its_classes_even_where_their_names_are_lost(tmp_path: Path, run: Run) -> None:
    folder, store = tiny_models.make_bert(tmp_path / "bert"), open_store(str(tmp_path / "run"))
    bert = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=5)
    write(store, 4, tuned(folder, bert), f"--finetune.model={folder}", "--finetune.task=classification")
    assert "The classes have no names" in run("export", store.url, "latest", str(tmp_path / "out"))[2]
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert again.config.num_labels == 5
    assert torch.equal(again.classifier.weight, bert.classifier.weight)


@pytest.mark.parametrize("arguments", [["--model.layers=1", "--model.width=16", "--model.heads=2"], None])
def test_what_transformers_does_not_know_keeps_its_names(arguments: list[str] | None, tmp_path: Path, run: Run) -> None:
    tensors = some() if arguments is None else model_tensors(gpt_of(*arguments))
    store = open_store(str(tmp_path / "run"))
    write(store, 3, {**tensors, "optimizer/a/exp_avg": torch.ones(3)}, *(arguments or []))
    code, _, err = run("export", store.url, "3", str(tmp_path / "out"))
    assert code == 0
    assert (
        "not one that trainrun brings" if arguments is None else "not Llama's architecture (model.activation is 'relu2'"
    ) in err
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == {name.removeprefix("model/") for name in tensors}
    assert all(torch.equal(found[name.removeprefix("model/")], tensor) for name, tensor in tensors.items())


def test_export_leaves_other_files_alone_and_fails_before_it_reads(
    store: Store, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    code, _, err = run("export", store.url, "latest", str(out))
    assert code == 2
    assert "is not empty: it has mine.txt. Name another folder, or give --force" in err
    assert run("export", store.url, "latest", str(out / "mine.txt"))[0] == 2
    assert run("export", store.url, "latest", str(out), "--force", "--max-shard-size", "200B")[0] == 2
    assert run("export", store.url, "latest", str(out), "--force", "--max-shard-size", "0.2KB")[0] == 0
    assert len(list(out.glob("model-*"))) == 4
    assert run("export", store.url, "latest", str(out), "--force")[0] == 0
    assert sorted(path.name for path in out.iterdir()) == ["mine.txt", "model.safetensors"]

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    code, _, err = run("export", store.url, "latest", str(tmp_path / "new"))
    assert code == 2
    assert "No space left on device" in err
    assert not (tmp_path / "new").exists()


def test_neither_converting_nor_exporting_holds_a_model_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainrun.checkpoint.convert.SHARD_SIZE", 16 * 1024**2)
    store = open_store(str(tmp_path / "run"))
    parts = (whole(f"model/{number}", torch.full((2**21,), float(number))) for number in range(20))  # 8 MiB each
    with most_memory() as most:
        commit = convert(Foreign(format="test", step=1, bytes=0, parts=parts), store).commit
        export(store, commit, str(tmp_path / "out"), largest_file=64 * 1024**2)
    assert commit.bytes == 160 * 1024**2
    assert most[0] < 100 * 1024**2
    assert torch.equal(load_file(tmp_path / "out/model-00003-of-00003.safetensors")["19"], torch.full((2**21,), 19.0))


@contextmanager
def most_memory() -> Iterator[list[int]]:
    """How much memory of its own (mapped files not counted) this process took at most beyond what it had."""

    def taken() -> int:
        match = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match
        return 1024 * int(match[1])

    before, most, over = taken(), [0], threading.Event()

    def watch() -> None:
        while not over.wait(0.002):
            most[0] = max(most[0], taken() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield most
    finally:
        over.set()
        thread.join()


def test_a_damaged_checkpoint_is_not_exported(store: Store, run: Run, tmp_path: Path) -> None:
    name = flip(store, read_commit(store, 1000))
    code, _, err = run("export", store.url, "latest", str(tmp_path / "out"))
    assert code == 1
    assert "the checkpoint is damaged" in err
    assert name in err
    assert not (tmp_path / "out").exists()
    store.delete([read_commit(store, 1000).shards[0].key])
    code, _, err = run("export", store.url, "latest", str(tmp_path / "out"))
    assert code == 1
    assert "is missing. Of the run's checkpoints (100, 200, 1000), name another" in err


# prune


def test_prune_says_first_and_deletes_only_when_told(store: Store, run: Run) -> None:
    write(store, 1500, some(), "--strategy=ddp")
    code, out, _ = run("prune", store.url, "--keep", "2")
    assert code == 0
    assert "keep    step      1000  (newest)" in out
    assert "delete  step       100\ndelete  step       200\n" in out
    assert "Would be deleted: 2 checkpoints" in out
    assert [row["step"] for row in json.loads(run("ls", store.url, "--json")[1])] == [100, 200, 1000, 1500]
    planned = json.loads(run("prune", store.url, "--keep", "2", "--keep-every", "200", "--json")[1])
    assert planned["kept"] == {"200": ["step"], "1000": ["newest", "step"], "1500": ["newest", "step"]}
    assert not planned["deleted"]
    assert run("prune", store.url, "--keep", "2", "--yes")[0] == 0
    assert [row["step"] for row in json.loads(run("ls", store.url, "--json")[1])] == [1000, 1500]
    assert {item.key.split("/")[0] for item in store.list()} == {"step-000001000", "step-000001500"}
    code, _, err = run("prune", store.url, "--keep", "1", "--yes")
    assert code == 2
    assert "keep is 1. Allowed: 2 or more" in err


# diff


def test_diff_tells_tensors_settings_and_the_rest(tmp_path: Path, run: Run) -> None:
    a, b = open_store(str(tmp_path / "a")), open_store(str(tmp_path / "b"))
    left = {**some(), "model/only": torch.ones(1), "model/kind": torch.ones(2), "model/n": torch.tensor([1.0, 0.0])}
    right = {**some(), "model/new": torch.ones(1), "model/kind": torch.ones(3), "model/n": torch.tensor([1.0, -0.0])}
    right["model/b"] = left["model/b"].clone()
    right["model/b"][3, 2] += 0.5
    write(a, 1, left, "--seed=1", shard=100)
    write(b, 1, right, "--seed=2")
    code, out, _ = run("diff", a.url, b.url)
    assert code == 1
    assert "3 tensors the same bit for bit, 2 not." in out
    for line in (
        "only in A: model/only",
        "only in B: model/new",
        "other kind: model/kind is float32 [2] in A, float32 [3] in B",
        "differs: model/b by up to 0.5",
        "differs: model/n by up to 0",
        "setting seed: 1 in A, 2 in B",
    ):
        assert line in out.splitlines()
    found = json.loads(run("diff", a.url, f"{b.url}@1", "--json")[1])
    assert found["different"] == {"model/b": 0.5, "model/n": 0.0}
    assert found["settings"] == {"seed": [1, 2]}
    assert found["others"] == {"world": [5, 1]}


def test_the_same_checkpoint_has_no_differences_however_it_is_cut(tmp_path: Path, run: Run) -> None:
    store = open_store(str(tmp_path / "run"))
    tensors = {**some(), "model/nan": torch.tensor([float("nan"), 1.0])}
    write(store, 1, tensors)
    assert run("diff", store.url, store.url)[:2] == (0, "5 tensors the same bit for bit, 0 not.\n")
    tensors["model/nan"] = torch.tensor([1.0, 1.0])
    write(store, 2, tensors)
    code, out, _ = run("diff", store.url, "1")
    assert code == 1
    assert "differs: model/nan by up to nan" in out
    assert "step: 2 in A, 1 in B" in out
    assert json.loads(run("diff", store.url, "1", "--json")[1])["different"] == {"model/nan": None}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64]
)
def test_differences_of_numbers(dtype: torch.dtype) -> None:
    a = torch.tensor([1.0, 2.0, float("nan")]).to(dtype)
    b = torch.tensor([1.5, 2.0, float("nan")]).to(dtype)
    assert largest_difference(a, a.clone()) is None
    assert largest_difference(a, b) == 0.5


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_differences_of_whole_numbers(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([1, 0, 1]).to(dtype)
    assert largest_difference(a, b) == 1.0


# convert (more in tests/trainrun/checkpoint/test_convert.py)


def test_convert_makes_a_checkpoint_that_the_other_commands_know(tmp_path: Path, run: Run) -> None:
    gpt = gpt_of(*LLAMA)
    dcp.save({"model": gpt.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    settings = tmp_path / "train.yaml"
    settings.write_text("\n".join(line.removeprefix("--").replace("=", ": ") for line in LLAMA[-2:]) + "\n")
    model = ", ".join(line.removeprefix("--model.").replace("=", ": ") for line in LLAMA[:-2])
    settings.write_text(settings.read_text() + f"model: {{{model}}}\n")
    target = str(tmp_path / "runs/run")
    code, _, err = run("convert", str(tmp_path / "dcp"), target)
    assert code == 2
    assert "--step" in err
    arguments = ["convert", str(tmp_path / "dcp"), target, "--step", "9", "--settings", str(settings)]
    code, out, err = run(*arguments, "--rename", "^head[.]=head.")
    assert code == 0
    assert out.startswith("Step 9 (torch.distributed.checkpoint, ")
    assert "position in the data are not carried over" in err
    assert run("verify", target)[0] == 0
    assert run(*arguments)[0] == 2


def test_prune_keeps_the_best_as_asked_and_says_when_there_is_nothing(store: Store, run: Run) -> None:
    assert run("prune", store.url, "--keep", "9")[1].endswith("Nothing to delete.\n")
    code, _, err = run("prune", store.url, "--keep", "2", "--best", "highest")
    assert (code, "Give --keep-best as well" in err) == (2, True)
    assert run("prune", store.url, "--keep", "2", "--keep-best", "1", "--best", "highest")[0] == 0


def test_verify_tells_what_was_set_aside_from_what_never_was(store: Store, run: Run) -> None:
    store.put("step-000000200/DAMAGED-20261130T000000-abcdef.json", store.get(commit_key(200)))
    store.delete([commit_key(200)])
    code, _, err = run("verify", store.url, "200")
    assert code == 2
    assert "step 200 was found damaged by a run that resumed, and set aside" in err
    code, _, err = run("verify", store.url, "7")
    assert (code, "There is no checkpoint of step 7" in err) == (2, True)
    store.delete([commit_key(100), commit_key(1000)])
    code, _, err = run("verify", store.url)
    assert (code, "There is no checkpoint at" in err) == (2, True)
