"""The library as others get it: a wheel, installed, and imported by an app that knows nothing of this repository."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")

APP = textwrap.dedent(
    """
    import aws_cdk as cdk
    import traincluster
    from traincluster import Capacity, CheckpointBucket, TrainingCluster, TrainingJob, TrainingNetwork

    app = cdk.App()
    stack = cdk.Stack(app, "Mine")
    TrainingCluster(
        stack, "Cluster", network=TrainingNetwork(stack, "Network"), instance_type="p5.48xlarge", nodes=4,
        capacity=Capacity.block("cr-0123456789abcdef0"), checkpoints=CheckpointBucket(stack, "Checkpoints"),
        job=TrainingJob(run="first", source="project", entry_point="train.py"),
    )
    app.synth()
    print(traincluster.__file__)
    """
)


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel; no index is asked, since the build backend is in the environment."""
    folder = tmp_path_factory.mktemp("wheel")
    run(*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, ROOT, cwd=folder)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_holds_the_packages_with_their_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"traincluster", "trainrun", "trainlocal"}
    for name in ("bootstrap.sh", "instances/catalogue.json", "instances/offerings.json"):
        assert f"traincluster/{name}" in names
    assert not [name for name in names if "__pycache__" in name or name.startswith("tests")]


def test_another_app_synthesizes_with_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    site, app = tmp_path / "site", tmp_path / "app"
    (app / "project").mkdir(parents=True)
    (app / "project" / "train.py").write_text("print('training')\n")
    (app / "app.py").write_text(APP)
    run(*PIP, "install", "--no-deps", "--no-index", "--target", site, wheel, cwd=tmp_path)
    printed = run(sys.executable, "app.py", cwd=app, PYTHONPATH=str(site), CDK_OUTDIR=str(app / "cdk.out"))
    assert Path(printed.strip()) == site / "traincluster" / "__init__.py"

    resources = json.loads((app / "cdk.out" / "Mine.template.json").read_text())["Resources"].values()
    (template,) = [one for one in resources if one["Type"] == "AWS::EC2::LaunchTemplate"]
    interfaces = template["Properties"]["LaunchTemplateData"]["NetworkInterfaces"]
    assert sum(one["InterfaceType"].startswith("efa") for one in interfaces) == 32
