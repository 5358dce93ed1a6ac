"""Environments that a node makes: a venv with requirements, kept in the bucket; conda, by a stand-in for its programs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from trainrun.node import built_environment, venv, venv_probe
from trainrun.node.cached_folder import COMPLETE, CachedFolder
from trainrun.node.commands import run
from trainrun.node.conda import prepare_conda
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.software import Software
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec
from trainrun.store import Store, StoreError, open_store

needs_uv = pytest.mark.skipif(not shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}"), reason="no uv")


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel with one module of that name."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    files = {
        f"{name}.py": f"version = {version!r}\n",
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for file, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            record += f"{file},sha256={digest},{len(text)}\n"
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all packages come from."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    wheel(folder, "leaf", "1.0")
    wheel(folder, "model", "2.0", "torch>=2", "leaf")
    wheel(folder, "late", "1.0", "torch>=99")
    wheel(folder, "torch", "99.0")
    return folder


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made_places = Places(root=tmp_path / "root")
    made_places.project.mkdir(parents=True)
    return made_places


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "bucket/software"))


def spec(**fields: Any) -> RunSpec:
    storage = fields.pop("storage", StorageSpec(location="s3://bucket"))
    cluster = ClusterSpec(name="c", instance_type="t", nodes_min=1, nodes_desired=1, nodes_max=1)
    return RunSpec(run="demo", region="us-east-1", cluster=cluster, job=JobSpec(entry_point="t.py", **fields), storage=storage)


def prepared(places: Places, store: Store, text: str, **fields: Any) -> tuple[Software, str]:
    (places.project / "requirements.txt").write_text(text)
    document = spec(requirements="requirements.txt", **fields)
    return venv.prepare_venv(document, python=sys.executable, places=places, store=store, run=run)


def ask(software: Software, program: str) -> str:
    command = software.command([software.python, "-c", program])
    done = subprocess.run(command, env=software.environment(os.environ), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@needs_uv
def test_requirements_come_on_top_of_the_image_whose_torch_stays(index, places, store):
    software, told = prepared(places, store, "model==2.0  # needs torch and leaf\n")
    program = "import importlib.util as u, leaf, model; print(leaf.version, model.version, u.find_spec('torch').origin)"
    leaf, model, torch = ask(software, program).split()
    assert (leaf, model) == ("1.0", "2.0")
    assert torch.startswith(sys.prefix)  # not the 99.0 that the index has
    assert "made in" in told and "; kept in" in told and "2 packages besides the image's torch" in told
    environment = software.environment({"PATH": "/bin"})
    assert environment["PATH"] == f"{environment['VIRTUAL_ENV']}/bin:/bin"


@needs_uv
def test_another_node_fetches_what_one_has_made_and_a_second_start_has_it(index, places, store):
    first, _ = prepared(places, store, "leaf\n")
    assert "was there" in prepared(places, store, "leaf\n")[1]
    shutil.rmtree(Path(first.python).parents[1])  # another node has the same paths
    shutil.rmtree(index)  # and no index
    second, told = prepared(places, store, "leaf\n")
    assert "fetched from" in told
    assert second.python == first.python and ask(second, "import leaf; print(leaf.version)") == "1.0"


@needs_uv
def test_other_requirements_another_path_and_another_file_below_are_another_environment(index, places, store, tmp_path):
    (places.project / "more.txt").write_text("leaf\n")
    one, _ = prepared(places, store, "-r more.txt\n")
    (places.project / "more.txt").write_text("leaf==1.0\n")
    other, _ = prepared(places, store, "-r more.txt\n")
    stored = StorageSpec(location="s3://bucket", instance_store="/scratch")
    on_disk, _ = prepared(places, store, "-r more.txt\n", storage=stored)
    assert len({one.python, other.python, on_disk.python}) == 3
    assert on_disk.python.startswith(str(places.root / "scratch/traincluster/software"))


@needs_uv
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("torch==2.1\n", r"torch==2.1 is required, but the image has torch 2\."),
        ("late\n", r"do not go with the image's torch: late 1.0 needs torch.*99"),
        ("nothing-of-the-kind\n", "Is there a way to an index of packages"),
        ("-r gone.txt\n", "names 'gone.txt', which is not in the job's source"),
    ],
)
def test_requirements_that_cannot_be_met_are_told_and_leave_nothing(index, places, store, text, words):
    with pytest.raises(StepFailed, match=words):
        prepared(places, store, text)
    assert not [*(places.root / "opt/traincluster/software").glob("*")]
    assert not [*store.list()]


def test_without_uv_and_without_an_index_that_is_told(index, places, store, monkeypatch):
    monkeypatch.setattr(venv.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(built_environment, "PAUSES", ())
    monkeypatch.setattr(venv, "tried", lambda action, *, final: action())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    python = Path(sys.executable)
    image = places.root / "image/python"  # beside which there is no uv
    image.parent.mkdir(parents=True)
    image.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
    image.chmod(0o755)
    with pytest.raises(StepFailed, match="The image has no uv"):
        venv.find_uv(str(image), home=places.root / "uv", variables=dict(os.environ))


def test_the_family_of_torch_is_what_is_made_for_one_version_of_it(tmp_path, monkeypatch):
    for name, needs in (("torch", []), ("torchvision", ["torch==2.9.0"]), ("accelerate", ["torch>=2.0"])):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n" + "".join(f"Requires-Dist: {n}\n" for n in needs))
    monkeypatch.setattr(venv_probe.sys, "path", [str(tmp_path)])
    assert venv_probe.torch_family() == {"torch": "1.0", "torchvision": "1.0"}


@pytest.mark.parametrize(
    ("line", "contradicts"),
    [
        ("torch", False),
        ("torch>=2.5,<3 ; python_version > '3'", False),
        ("Torch ==2.9.0", False),
        ("torch==2.8 ; python_version < '3'", False),
        ("torch==2.8  # old", True),
        ("torch @ https://index.test/torch.whl", True),
        ("--index-url https://index.test/simple", False),
        ("numpy==1.0", False),
    ],
)
def test_lines_that_want_another_torch(line, contradicts):
    assert bool([*venv_probe.contradictions(line, {"torch": "2.9.0+cu128"})]) is contradicts


class TestKept:
    """Folders that are made once, whatever is in them."""

    def kept(self, tmp_path: Path, store: Store, node: str = "one") -> CachedFolder:
        return CachedFolder(folder=tmp_path / node / "abc", store=store, run=run)

    def make(self, kept: CachedFolder, text: str = "made") -> str:
        def make() -> str:
            kept.folder.mkdir(parents=True)
            (kept.folder / "file").write_text(text)
            (kept.folder / "link").symlink_to("/bin/sh")
            return "by the test"

        return kept.obtain(make, verify=lambda: None)

    def test_two_nodes_that_make_it_at_once_keep_the_first(self, tmp_path, store):
        one, other = self.kept(tmp_path, store), self.kept(tmp_path, store, "other")

        def make_while_other_does() -> str:
            self.make(other, "other's")
            one.folder.mkdir(parents=True)
            return ""

        told = one.obtain(make_while_other_does, verify=lambda: None)
        assert "kept" not in told
        third = self.kept(tmp_path, store, "third")
        assert "fetched" in self.make(third)
        assert (third.folder / "file").read_text() == "other's" and (third.folder / "link").is_symlink()
        assert len([*store.list("abc/")]) == 1

    def test_a_pointer_that_appears_between_asking_and_writing_wins(self, tmp_path, store, monkeypatch):
        self.make(self.kept(tmp_path, store))
        late = self.kept(tmp_path, store, "late")
        monkeypatch.setattr(CachedFolder, "_fetch", lambda *_: (False, ""))
        monkeypatch.setattr(CachedFolder, "_is_kept", lambda _: False)
        self.make(late, "late's")
        assert len([*store.list("abc/")]) == 1  # its own archive is gone again

    @pytest.mark.parametrize("harm", ["archive", "pointer"])
    def test_an_archive_that_is_harmed_is_made_anew_and_replaced(self, tmp_path, store, harm):
        self.make(self.kept(tmp_path, store))
        (archive,) = store.list("abc/")
        store.put(archive.key if harm == "archive" else "abc.json", b"[]")
        told = self.make(self.kept(tmp_path, store, "other"))
        assert "was of no use" in told and "made in" in told
        assert "fetched" in self.make(self.kept(tmp_path, store, "third"))

    def test_a_bucket_that_answers_nothing_is_a_remark(self, tmp_path, store, monkeypatch):
        def fails(*_: object, **__: object) -> None:
            raise StoreError("no way to S3")

        for name in ("get", "put", "put_new", "put_file"):
            monkeypatch.setattr(type(store), name, fails)
        told = self.make(self.kept(tmp_path, store))
        assert "made in" in told and told.count("no way to S3") == 2

    def test_what_was_interrupted_is_made_anew(self, tmp_path, store):
        kept = self.kept(tmp_path, store)
        kept.folder.mkdir(parents=True)
        (kept.folder / "half").touch()
        self.make(kept)
        assert not (kept.folder / "half").exists() and (kept.folder / COMPLETE).exists()

    def test_a_failure_leaves_nothing(self, tmp_path, store):
        kept = self.kept(tmp_path, store)

        def fails() -> None:
            raise StepFailed("not this one")

        with pytest.raises(StepFailed):
            kept.obtain(lambda: str(kept.folder.mkdir(parents=True)), verify=fails)
        assert not kept.folder.exists() and not [*store.list()]


CONDA = """#!{python} -S
import json, os, pathlib, subprocess, sys
arguments = sys.argv[1:]
(pathlib.Path(__file__).parent / "log").write_text(json.dumps(arguments))
if os.environ.get("CONDA_FAILS"):
    sys.exit("ResolvePackageNotFound:\\n  - pytorch=99")
while arguments[0] in ("env", "create", "--quiet"):
    arguments.pop(0)
assert arguments[0] == "--prefix" and arguments[2] == "--file" and pathlib.Path(arguments[3]).exists()
subprocess.run([{python!r}, "-m", "venv", "--without-pip", arguments[1]], check=True)
"""


@pytest.fixture
def conda(tmp_path: Path) -> Path:
    folder = tmp_path / "conda"
    folder.mkdir()
    (folder / "micromamba").write_text(CONDA.format(python=sys.executable))
    (folder / "micromamba").chmod(0o755)
    return folder


def test_a_conda_environment_is_made_once_and_fetched_after(places, store, conda):
    (places.project / "environment.yml").write_text("dependencies: [pytorch]\n")
    document = spec(conda="environment.yml")
    software, told = prepare_conda(document, places=places, store=store, run=run, folders=[str(conda)])
    assert "made in" in told and "micromamba" in told
    assert json.loads((conda / "log").read_text())[0] == "create"
    assert software.environment({})["CONDA_PREFIX"] == ask(software, "import sys; print(sys.prefix)")
    shutil.rmtree(Path(software.python).parents[1])
    (conda / "micromamba").unlink()
    _, told = prepare_conda(document, places=places, store=store, run=run, folders=[str(conda)])
    assert "fetched from" in told


def test_conda_itself_makes_environments_by_its_own_words(places, store, conda):
    (conda / "micromamba").rename(conda / "conda")
    (places.project / "environment.yml").write_text("dependencies: [pytorch]\n")
    prepare_conda(spec(conda="environment.yml"), places=places, store=store, run=run, folders=[str(conda)])
    assert json.loads((conda / "log").read_text())[:2] == ["env", "create"]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("CONDA_FAILS", "ResolvePackageNotFound"), ("gone", "has none of micromamba"), ("file", "not in the job's")],
)
def test_a_conda_environment_that_cannot_be_is_told(places, store, conda, monkeypatch, fault, words):
    if fault == "gone":
        (conda / "micromamba").unlink()
    if fault != "file":
        (places.project / "environment.yml").write_text("dependencies: [pytorch=99]\n")
    monkeypatch.setenv(fault, "1")
    with pytest.raises(StepFailed, match=words):
        prepare_conda(spec(conda="environment.yml"), places=places, store=store, run=run, folders=[str(conda)])
    assert not [*store.list()]


def test_passwords_in_urls_are_not_told():
    with pytest.raises(StepFailed) as failure:
        built_environment.said(
            ["sh", "-c", "echo https://user:hunter2@index.test/simple failed >&2; exit 1"],
            environment=dict(os.environ),
            quiet="it",
        )
    assert "hunter2" not in str(failure.value) and "https://index.test/simple" in str(failure.value)
