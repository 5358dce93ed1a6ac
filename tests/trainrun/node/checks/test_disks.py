"""Writing to disks and mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainrun.node.checks.disks import check_disk, check_reading, read_only_folders, writable_folders
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.spec import MountSpec, StorageSpec, VolumeSpec


def test_what_can_be_written_is_left_as_it_was(tmp_path):
    (tmp_path / "kept").write_text("kept")
    assert check_disk(tmp_path, node="i-1").startswith(f"{tmp_path} can be written, ")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_mount_that_is_not_there(tmp_path):
    with pytest.raises(StepFailed, match=r"fsx cannot be written and read: No such file or directory\..*Is it mounted"):
        check_disk(tmp_path / "fsx", node="i-1")


def test_a_full_disk(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainrun.node.checks.disks.write_through", full)
    with pytest.raises(StepFailed, match=r"No space left on device\..*not full \(df\)"):
        check_disk(tmp_path, node="i-1")


def test_a_disk_that_gives_back_something_else(tmp_path, monkeypatch):
    monkeypatch.setattr("trainrun.node.checks.disks.write_through", lambda file, data: file.write_bytes(data[:-1] + b"?!"))
    with pytest.raises(StepFailed, match="does not give back what was written"):
        check_disk(tmp_path, node="i-1")


def test_a_root_disk_that_is_nearly_full_is_found_before_training(tmp_path):  # ADT issue 127
    with pytest.raises(StepFailed, match=r"GiB free, and 1e\+09 GiB are needed"):
        check_disk(tmp_path, node="i-1", least_free=10**9 * 1024**3)


def test_where_the_job_writes():
    storage = StorageSpec(
        location="s3://b",
        instance_store="/scratch",
        volumes=(VolumeSpec(device="/dev/sdf", path="/data"),),
        mounts=(
            MountSpec(type="lustre", source="fs@tcp:/x", path="/fsx"),
            MountSpec(type="nfs4", source="fs:/", path="/corpus", options="ro,hard"),
        ),
    )
    places = Places(root=Path("/node"))
    assert list(map(str, writable_folders(storage, places))) == ["/node/scratch", "/node/data", "/node/fsx"]
    assert list(map(str, read_only_folders(storage, places))) == ["/node/corpus"]


def test_what_is_for_reading_only_is_listed(tmp_path):
    (tmp_path / "a").touch()
    assert check_reading(tmp_path) == f"{tmp_path} (for reading only) has 1 entries"
    with pytest.raises(StepFailed, match="cannot be listed: No such file"):
        check_reading(tmp_path / "none")
