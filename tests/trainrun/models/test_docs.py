"""What docs/models.md shows runs, and the configurations in examples/ are right."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

from trainrun.settle import settle

ROOT = Path(__file__).parents[3]
BLOCKS = re.findall(r"```(python|sh)\n(.*?)```", (ROOT / "docs/models.md").read_text(), re.DOTALL)


ONE_AFTER_ANOTHER = """
import json, runpy, sys
for command in json.loads(sys.argv[1]):
    sys.argv = command if command[0] != "-m" else command[1:]
    try:
        (runpy.run_module if command[0] == "-m" else runpy.run_path)(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            sys.exit(f"{command}: {end.code}")
    print("done: ", *command)
"""
"""Commands in one process, which imports torch and transformers once for all of them."""


def test_the_commands_of_the_page_run_as_they_are(tmp_path: Path, corpus: Path) -> None:
    (tmp_path / "corpus").symlink_to(corpus)
    tiny_models.make_llama(tmp_path / "models/llama")
    tiny_models.make_bert(tmp_path / "models/bert")
    tiny_models.write_sums(tmp_path / "sums.jsonl")
    tiny_models.write_films(tmp_path / "films.jsonl")
    (program,) = [text for kind, text in BLOCKS if kind == "python"]
    (tmp_path / "bigram.py").write_text(program)
    commands = [shlex.split(line) for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    assert len(commands) == 10
    assert {command[0] for command in commands} == {"python"}
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "training"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    arguments = [sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps([command[1:] for command in commands])]
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("done: ") == 10
    assert (tmp_path / "models/sums/model.safetensors").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.stem)
@pytest.mark.parametrize("ranks", [8, 32])
def test_the_configurations_are_right_for_whole_nodes(path: Path, ranks: int) -> None:
    settings = settle(path, [])
    sequences = settings.batch_examples or settings.batch_tokens // settings.sequence_length
    assert sequences % (ranks // settings.sharding.tensor_parallel) == 0
    assert str(path.name) in path.read_text() or settings.model.preset == path.stem
