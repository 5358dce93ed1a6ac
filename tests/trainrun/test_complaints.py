"""What scripts say that end by an error: one sentence of ours instead of a traceback, and once for all ranks."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trainrun import complaints
from trainrun.config import ConfigError
from trainrun.settings import TrainSettings

SETTINGS = [
    "--steps=1000000",
    "--log_every=1000000",
    "--checkpoint.every_steps=2",
    "--strategy=ddp",
    "--checkpoint.location=runs",
]

LOOP = """
import os, signal
import trainrun
from trainrun.models.gpt import GPT
from trainrun.optimizer import adamw

run = trainrun.start()
data = run.tokens()
gpt = GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)
model, optimizer = run.prepare(gpt, adamw(gpt, run.settings.optimizer))
state = run.state(model=model, optimizer=optimizer, data=data)
state.resume()
for step in run.steps():
    for batch in data.micro_batches():
        run.backward(model.loss(batch))
    run.step(optimizer)
    state.save()
    if step == 3:
        state.wait()
        os.kill(os.getpid(), signal.SIGINT)
"""


def ended(folder: Path, script: str, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    command = [sys.executable, *launcher, "train.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_an_interrupted_run_says_where_it_stood(tmp_path: Path, dataset: str, tiny: list[str]) -> None:
    answer = ended(tmp_path, LOOP, f"--data={dataset}", *tiny, *SETTINGS)
    assert answer.stderr.splitlines()[-1] == "Interrupted at step 3. The newest checkpoint is of step 2."
    assert "Traceback" not in answer.stderr
    assert answer.returncode == 130


@pytest.mark.parametrize(
    ("last", "said"),
    [
        ("raise ConfigError(['One.', 'Two.'])", "trainrun: One.\nTwo.\n"),
        ("raise KeyboardInterrupt", "Interrupted at step 0. There is no checkpoint.\n"),
        ("run._norm = float('nan'); run.check_finite()", "trainrun: The gradient norm at step 0 is nan"),
    ],
)
def test_errors_of_ours_are_sentences(tmp_path: Path, last: str, said: str) -> None:
    script = f"import trainrun\nfrom trainrun.config import ConfigError\nrun = trainrun.start()\n{last}\n"
    answer = ended(tmp_path, script)
    assert answer.stderr.startswith(said)
    assert "Traceback" not in answer.stderr
    assert answer.returncode == (130 if "Keyboard" in last else 1)


def test_errors_of_others_keep_their_traceback(tmp_path: Path) -> None:
    answer = ended(tmp_path, "import trainrun\nrun = trainrun.start()\nraise MemoryError('theirs')\n")
    assert "Traceback" in answer.stderr
    assert answer.stderr.endswith("MemoryError: theirs\n")
    assert answer.returncode == 1


def test_one_rank_tells_of_a_wrong_setting_for_all(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    answer = ended(tmp_path, "import trainrun\ntrainrun.start()\n", "--stepz=1", launcher=launcher)
    said = [line for line in answer.stderr.splitlines() if "stepz" in line]
    assert said == ["trainrun: Unknown setting 'stepz' in the command line. Did you mean 'steps'?"]
    assert answer.returncode == 1


def test_a_rank_that_is_alone_with_its_error_tells_it_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(complaints, "PATIENCE", 0.0)
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("LOCAL_RANK", "1")
    handler = signal.getsignal(signal.SIGTERM)
    complaints.Complaints()(ConfigError, ConfigError(["One.", "Two."]), None)
    signal.signal(signal.SIGTERM, handler)
    assert capsys.readouterr().err == "trainrun: rank 5: One.\nTwo.\n"


def test_help_lists_the_settings(tmp_path: Path) -> None:
    answer = ended(tmp_path, "import trainrun\ntrainrun.start('missing.yaml')\n", "--help")
    words = {word.strip(",") for word in answer.stdout.split()}
    assert {"train.py", "docs/settings.md."} | {each.name for each in dataclasses.fields(TrainSettings)} <= words
    assert (answer.returncode, answer.stderr) == (0, "")
