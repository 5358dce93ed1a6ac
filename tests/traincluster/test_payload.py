"""The payload: equal sources give equal bytes, and nothing goes in or stays out unsaid."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from traincluster import payload
from traincluster.payload import pack


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "package"
    (folder / "node" / "__pycache__").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "node" / "__init__.py").write_text("x = 1\n")
    (folder / "node" / "__pycache__" / "x.pyc").write_bytes(b"\0")
    return folder


def project(folder: Path) -> Path:
    (folder / "library").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / ".env").write_text("TOKEN=secret")
    (folder / "train.py").write_text("print('train')\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "library" / "model.py").write_text("")
    return folder


def members(archive: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getmembers()


def test_holds_the_package_and_the_project(package, tmp_path):
    packed = pack(project(tmp_path / "project"), package=package)
    assert [member.name for member in members(packed.archive)] == [
        "project/library/model.py",
        "project/run.sh",
        "project/train.py",
        "trainrun/__init__.py",
        "trainrun/node/__init__.py",
    ]


def test_carries_no_trace_of_the_machine(package, tmp_path):
    for member in members(pack(project(tmp_path / "project"), package=package).archive):
        assert (member.mtime, member.uid, member.gid, member.uname, member.gname) == (0, 0, 0, "", "")
        assert member.mode == (0o755 if member.name.endswith(".sh") else 0o644)


def test_equal_sources_elsewhere_and_later_give_equal_bytes(package, tmp_path):
    first = project(tmp_path / "here")
    second = project(tmp_path / "there")
    os.utime(second / "train.py", (1, 1))
    (second / "train.py").chmod(0o600)
    assert pack(first, package=package) == pack(second, package=package)


def test_any_change_of_code_is_a_change_of_digest(package, tmp_path):
    folder = project(tmp_path / "project")
    before = pack(folder, package=package).sha256
    (folder / "train.py").write_text("print('train!')\n")
    assert pack(folder, package=package).sha256 != before


def test_by_default_it_is_the_trainrun_that_is_imported_here():
    names = [member.name for member in members(pack(None).archive)]
    assert {"trainrun/__init__.py", "trainrun/spec.py", "trainrun/node/__init__.py"} <= set(names)
    assert all(name.startswith("trainrun/") and "__pycache__" not in name for name in names)


def test_a_link_out_of_the_source_is_refused(package, tmp_path):
    folder = project(tmp_path / "project")
    (tmp_path / "outside.py").write_text("")
    (folder / "outside.py").symlink_to(tmp_path / "outside.py")
    with pytest.raises(ValueError, match="only links to files of the source are packed"):
        pack(folder, package=package)


def test_a_link_to_a_folder_is_refused_even_when_it_is_a_loop(package, tmp_path):
    folder = project(tmp_path / "project")
    (folder / "library" / "loop").symlink_to(folder)
    with pytest.raises(ValueError, match="only links to files of the source are packed"):
        pack(folder, package=package)


def test_a_link_within_the_source_is_followed(package, tmp_path):
    folder = project(tmp_path / "project")
    (folder / "library" / "alias.py").symlink_to("../train.py")
    archive = pack(folder, package=package).archive
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        assert tar.extractfile("project/library/alias.py").read() == b"print('train')\n"


def test_too_large_a_source_names_its_largest_file(package, tmp_path, monkeypatch):
    folder = project(tmp_path / "project")
    (folder / "corpus.bin").write_bytes(b"\0" * 2000)
    monkeypatch.setattr(payload, "MOST_SOURCE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"at most 1,000 are packed. The largest file is project/corpus.bin \(2,000 bytes\)"):
        pack(folder, package=package)


def test_a_source_that_is_no_folder_is_refused(package, tmp_path):
    with pytest.raises(ValueError, match="which is not a folder"):
        pack(tmp_path / "missing", package=package)
