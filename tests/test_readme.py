"""What the README and the documents claim is so."""

import re
import subprocess
import sys
from pathlib import Path

from aws_cdk.assertions import Template

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def python_block(containing):
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", README, flags=re.S) if containing in block]
    return block


def test_the_cdk_app_of_the_readme_makes_a_template(tmp_path, monkeypatch):
    project = tmp_path / "my_project"
    project.mkdir()
    (project / "train.py").write_text("print('training')\n")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(python_block("TrainingCluster("), "README.md", "exec"), names)
    Template.from_stack(names["stack"]).resource_count_is("AWS::EC2::LaunchTemplate", 1)


def test_the_training_loop_of_the_readme_trains(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("to be or not to be " * 400)
    (tmp_path / "text" / "b.txt").write_text("that is the question " * 400)
    python = [sys.executable, "-m", "trainrun", "tokens", "text", "--out", "tokens", "--held-out", "0.3"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "training"), "HOME": str(tmp_path)}
    subprocess.run(python, cwd=tmp_path, env=environment, check=True, timeout=60)
    settings = "steps: 3\ndata: tokens\nbatch_tokens: 256\nsequence_length: 64\ncheckpoint: {location: runs}\n"
    (tmp_path / "train.yaml").write_text(settings)
    bundled = python_block("trainrun.start(")
    own = bundled.replace("import trainrun\n", f"import torch\nimport trainrun\n{python_block('class Bigram')}")
    own = own.replace(
        "GPT(run.settings.model, vocabulary=data.vocabulary, context=data.sequence_length)", "Bigram(data.vocabulary)"
    )
    for name, program in (("bundled", bundled), ("own", own)):
        (tmp_path / f"{name}.py").write_text(program)
        subprocess.run([sys.executable, f"{name}.py", f"--run={name}"], cwd=tmp_path, env=environment, check=True, timeout=120)
        assert (tmp_path / "runs" / name / "step-000000003" / "COMMIT.json").exists()


def test_the_first_screen_holds_two_commands():
    first_screen = "\n".join(README.splitlines()[:24])
    assert re.findall(r"^\$ (make \w+)", first_screen, flags=re.M) == ["make demo", "make test"]


def test_links_lead_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("https://") or (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_settings_page_is_what_the_settings_say():
    subprocess.run([sys.executable, ROOT / "tools" / "make_docs.py", "--check"], check=True, timeout=60)
