"""Disks and shared file systems of a node, on a machine of our own invention: what commands would do to it is played out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainrun.node.attachments import attached_volumes
from trainrun.node.commands import run as run_command
from trainrun.node.disks import prepare_instance_store, prepare_volume
from trainrun.node.fstab import Mounted
from trainrun.node.lnet import choose, use_efa
from trainrun.node.mounts import prepare_mount
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.prepare import storage_steps
from trainrun.node.substeps import Done
from trainrun.node.tools import Tools
from trainrun.spec import MountSpec, StorageSpec, VolumeSpec

STORE, EBS = "Amazon EC2 NVMe Instance Storage", "Amazon Elastic Block Store"
LUSTRE = MountSpec(type="lustre", source="fs-1.fsx.us-east-1.amazonaws.com@tcp:/abc", path="/fsx")


@dataclass
class Machine:
    """A node: its disks, mounts, fstab and LNet. ``run`` stands for its commands."""

    folder: Path
    disks: list[dict[str, Any]] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)
    """What the next mounts fail with."""
    nets: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    """Of Lustre, those that are not at their defaults."""
    commands: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        (self.folder / "mounts").write_text("proc /proc proc rw 0 0\n")
        (self.folder / "fstab").write_text("LABEL=root / ext4 defaults 0 1\n")
        self.mounted = Mounted(table=self.folder / "mounts", fstab=self.folder / "fstab")
        self.tools = Tools(run=self.run, packages=None)

    def add_disk(self, model: str, *, serial: str = "", **more: Any) -> str:
        path = self.folder / f"nvme{len(self.disks)}n1"
        path.touch()
        self.disks.append({"path": str(path), "type": "disk", "model": f"{model}   ", "serial": serial, **more})
        return str(path)

    def place(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def fstab(self) -> list[str]:
        return (self.folder / "fstab").read_text().splitlines()

    def called(self, program: str) -> list[tuple[str, ...]]:
        return [command for command in self.commands if command[0] == program]

    def reboot(self) -> None:
        """All that a kernel keeps is gone, and what /etc/fstab says is mounted, as systemd does it."""
        (self.folder / "mounts").write_text("proc /proc proc rw 0 0\n")
        self.nets.clear()
        self.parameters.clear()
        for disk in self.disks:
            for one in (disk, *disk.pop("children", [])):
                one.pop("mountpoint", None)
        for line in self.fstab:
            fields = line.split()
            if not line.startswith("#") and fields[1] != "/" and "noauto" not in fields[3].split(","):
                with (self.folder / "mounts").open("a") as table:
                    table.write(f"{fields[0]} {fields[1]} {fields[2]} rw 0 0\n")

    def run(self, *command: str, **_: Any) -> str:
        self.commands.append(command)
        if command[0] in self.missing or (command[0] == "sh" and command[2].rpartition(" ")[2] in self.missing):
            raise StepFailed(f"{' '.join(command)} cannot be run.")
        act: Callable[..., str | None] = getattr(self, "_" + command[0].replace(".", "_"), lambda *_: "")
        return act(*command[1:]) or ""

    def _lsblk(self, *_: str) -> str:
        return json.dumps({"blockdevices": [{"path": "/dev/loop0", "type": "loop"}, *self.disks]})

    def _named(self, path: str) -> dict[str, Any]:
        everything = [*self.disks, *(part for disk in self.disks for part in disk.get("children", []))]
        return next(one for one in everything if path in (one["path"], one.get("alias")))

    def _mkfs_xfs(self, *arguments: str) -> None:
        disk = self._named(arguments[-1])
        assert not disk.get("mountpoint"), "a mounted device was formatted"
        disk["fstype"], disk["uuid"] = "xfs", f"uuid-of-{Path(disk['path']).name}"
        disk["label"] = arguments[arguments.index("-L") + 1] if "-L" in arguments else None

    def _mdadm(self, verb: str, *arguments: str) -> None:
        if verb == "--create":
            members = [self._named(path) for path in arguments[-int(arguments[-1 - len(self._stores())].partition("=")[2]) :]]
            array = {"path": "/dev/md127", "alias": arguments[0], "type": "raid0"}
            for member in members:
                member.update(fstype="linux_raid_member", label="any:traincluster", children=[array])
        else:
            for member in self._stores():
                member["children"] = [{"path": "/dev/md127", "type": "raid0", "fstype": "xfs", "label": "traincluster"}]

    def _stores(self) -> list[dict[str, Any]]:
        return [disk for disk in self.disks if disk["model"].strip() == STORE]

    def _mount(self, *arguments: str) -> None:
        if self.failures:
            raise StepFailed(self.failures.pop(0))
        source, path = arguments[-2:]
        kind = arguments[arguments.index("-t") + 1] if "-t" in arguments else "none"
        with (self.folder / "mounts").open("a") as table:
            table.write(f"{source} {path} {kind} rw 0 0\n")
        if kind == "xfs":
            self._named(source)["mountpoint"] = path

    def _blkid(self, *arguments: str) -> str:
        return str(self._named(arguments[-1]).get("uuid", "uuid-of-old")) + "\n"

    def _lctl(self, *arguments: str) -> str:
        if arguments[0] == "set_param":
            name, _, value = arguments[1].partition("=")
            self.parameters[name] = value
        return f"{self.parameters.get(arguments[-1], '8')}\n" if arguments[0] == "get_param" else "lctl 2.15"

    def _lnetctl(self, *arguments: str) -> str | None:
        if arguments[:2] == ("net", "add"):
            self.nets.setdefault(arguments[3], []).append(arguments[5])
        if arguments[:2] == ("net", "show"):
            if arguments[3] not in self.nets:
                raise StepFailed("lnetctl failed with status 255")
            return "".join(f"        - nid: {device}@{arguments[3]}\n" for device in self.nets[arguments[3]])
        return None


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr("trainrun.node.mounts.processors_here", lambda: 2)  # with many, a file of the machine would be written
    return Machine(tmp_path)


def instance_store(machine: Machine, place: str) -> str:
    return prepare_instance_store(place, tools=machine.tools, mounted=machine.mounted).detail


def test_boot_09_only_instance_store_disks_are_formatted(machine):
    machine.add_disk(EBS, serial="vol01", children=[{"path": "/dev/nvme0n1p1", "fstype": "ext4", "mountpoint": "/"}])
    machine.add_disk(EBS, serial="vol02")  # a blank data volume: /dev/nvme1n1, which scripts like to take for the local disk
    stores = [machine.add_disk(STORE) for _ in range(8)]
    assert instance_store(machine, machine.place("scratch")) == f"instance store of 8 disks at {machine.place('scratch')}"
    (create,) = machine.called("mdadm")
    assert list(create[-8:]) == stores and "--level=0" in create and "--raid-devices=8" in create
    assert [command[-1] for command in machine.called("mkfs.xfs")] == ["/dev/md/traincluster"]
    assert machine.mounted.at(machine.place("scratch")) == "/dev/md/traincluster"


def test_boot_09_a_single_disk_needs_no_array(machine):
    disk = machine.add_disk(STORE)
    instance_store(machine, machine.place("scratch"))
    assert not machine.called("mdadm")
    assert machine.mounted.at(machine.place("scratch")) == disk


def test_boot_09_a_mount_of_the_image_is_reused_and_nothing_is_formatted(machine):
    for _ in range(2):  # as AWS's deep-learning images have it: one logical volume over all disks
        machine.add_disk(
            STORE,
            fstype="LVM2_member",
            children=[{"path": "/dev/mapper/vg.01-lv_ephemeral", "fstype": "ext4", "mountpoint": "/opt/dlami/nvme"}],
        )
    assert "mounted by the image at /opt/dlami/nvme" in instance_store(machine, machine.place("scratch"))
    assert machine.mounted.at(machine.place("scratch")) == "/opt/dlami/nvme"
    assert not machine.called("mkfs.xfs") and not machine.called("mdadm")


def test_boot_09_without_instance_store_a_folder_of_the_root_volume_serves(machine):
    machine.add_disk(EBS, serial="vol01")
    assert "folder of the root volume" in instance_store(machine, machine.place("scratch"))
    assert Path(machine.place("scratch")).is_dir()
    assert not machine.called("mkfs.xfs") and not machine.called("mount")


def test_boot_09_disks_without_a_device_file_are_the_hosts(machine):
    Path(machine.add_disk(STORE)).unlink()
    assert "no instance store found" in instance_store(machine, machine.place("scratch"))
    assert not machine.called("mkfs.xfs")


def test_instance_store_that_holds_something_else_is_refused(machine):
    machine.add_disk(STORE, fstype="zfs_member")
    with pytest.raises(StepFailed, match=r"holds something that traincluster did not make \(zfs_member\)"):
        instance_store(machine, machine.place("scratch"))
    assert not machine.called("mkfs.xfs")


def test_instance_store_may_be_prepared_again_and_after_a_reboot(machine):
    for _ in range(2):
        machine.add_disk(STORE)
    for _ in range(2):
        instance_store(machine, machine.place("scratch"))
    assert len(machine.called("mount")) == len(machine.called("mkfs.xfs")) == 1
    (machine.folder / "mounts").write_text("")  # a reboot, after which the array was not put together
    for disk in machine.disks:
        disk.pop("children")
    instance_store(machine, machine.place("scratch"))
    assert machine.called("mdadm")[-1] == ("mdadm", "--assemble", "--scan")
    assert machine.mounted.at(machine.place("scratch")) == "/dev/md127"
    assert len(machine.called("mkfs.xfs")) == 1


def test_a_blank_volume_is_formatted_once_and_returns_after_a_reboot(machine):
    machine.add_disk(STORE)
    machine.add_disk(EBS, serial="vol0aa")
    wanted = machine.add_disk(EBS, serial="vol0bb")
    volume = VolumeSpec(device="/dev/sdf", path=machine.place("data"))
    for _ in range(2):
        prepare_volume(volume, tools=machine.tools, mounted=machine.mounted, attached={"/dev/sdf": "vol-0bb"})
    assert machine.called("mkfs.xfs") == [("mkfs.xfs", wanted)]
    assert len(machine.called("mount")) == 1
    entry = f"UUID=uuid-of-{Path(wanted).name} {machine.place('data')} xfs noatime,nofail 0 0"
    assert machine.fstab.count(entry) == 1
    assert machine.fstab[0] == "LABEL=root / ext4 defaults 0 1"


def test_a_volume_with_files_is_mounted_as_it_is(machine):
    machine.add_disk(EBS, serial="vol0bb", fstype="ext4")
    volume = VolumeSpec(device="/dev/sdf", path=machine.place("data"))
    prepare_volume(volume, tools=machine.tools, mounted=machine.mounted, attached={"/dev/sdf": "vol-0bb"})
    assert not machine.called("mkfs.xfs")
    assert machine.called("mount")[0][:3] == ("mount", "-t", "ext4")


def test_a_volume_before_nitro_is_known_by_its_letter(machine):
    machine.disks.append({"path": machine.place("xvdf"), "type": "disk"})
    Path(machine.place("xvdf")).touch()
    volume = VolumeSpec(device=machine.place("xvdf"), path=machine.place("data"))
    prepare_volume(volume, tools=machine.tools, mounted=machine.mounted, attached={volume.device: "vol-0bb"})
    assert machine.mounted.at(machine.place("data")) == machine.place("xvdf")


def test_a_volume_may_take_a_while_to_show(machine):
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            machine.add_disk(EBS, serial="vol0bb")

    volume = VolumeSpec(device="/dev/sdf", path=machine.place("data"))
    attached = {"/dev/sdf": "vol-0bb"}
    prepare_volume(volume, tools=machine.tools, mounted=machine.mounted, attached=attached, timeout=5, pause=pause)
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("attached", "disk", "message"),
    [
        ({"/dev/sda1": "vol-0aa"}, {}, "EC2 tells of no volume /dev/sdf of this instance. It tells of: /dev/sda1"),
        ({"/dev/sdf": "vol-0cc"}, {}, "vol-0cc .* does not show as a disk within 0 seconds"),
        ({"/dev/sdf": "vol-0bb"}, {"children": [{"path": "/dev/nvme0n1p1"}]}, "holds partitions"),
    ],
)
def test_volumes_that_cannot_be_mounted(machine, attached, disk, message):
    machine.add_disk(EBS, serial="vol0bb", **disk)
    volume = VolumeSpec(device="/dev/sdf", path=machine.place("data"))
    with pytest.raises(StepFailed, match=message):
        prepare_volume(volume, tools=machine.tools, mounted=machine.mounted, attached=attached, timeout=0)
    assert not machine.called("mkfs.xfs")


def test_lustre_is_mounted_and_returns_after_a_reboot(machine):
    mount = MountSpec(type="lustre", source=LUSTRE.source, path=machine.place("fsx"))
    for _ in range(2):
        prepare_mount(mount, tools=machine.tools, mounted=machine.mounted, interface="ens5")
    assert machine.called("mount") == [("mount", "-t", "lustre", "-o", "noatime,flock", mount.source, mount.path)]
    assert machine.fstab[2] == f"{mount.source} {mount.path} lustre noatime,flock,_netdev,nofail 0 0"
    assert len(machine.fstab) == 4


def test_entries_of_fstab_are_ours_alone_and_follow_the_document(machine):
    for source, options in (("a:/", "ro"), ("b:/", "rw"), ("b:/", "rw")):
        machine.mounted.keep(source, "/one", "nfs4", options)
    machine.mounted.keep("c:/", "/two", "nfs4", "rw")
    assert machine.fstab[0] == "LABEL=root / ext4 defaults 0 1"
    assert machine.fstab[2:4] == ["b:/ /one nfs4 rw 0 0", "c:/ /two nfs4 rw 0 0"]
    assert len(machine.fstab) == 5


def test_efs_is_mounted_as_its_guide_says(machine):
    plain = MountSpec(type="nfs4", source="fs-1.efs.us-east-1.amazonaws.com:/", path=machine.place("efs"))
    tls = MountSpec(type="efs", source="fs-1:/", path=machine.place("tls"), options="tls")
    for mount in (plain, tls):
        prepare_mount(mount, tools=machine.tools, mounted=machine.mounted, interface="ens5")
    first, second = machine.called("mount")
    assert "nfsvers=4.1" in first[4] and "noresvport" in first[4]
    assert second == ("mount", "-t", "efs", "-o", "tls", "fs-1:/", tls.path)


def test_a_mount_is_tried_again_but_not_for_ever(machine):
    mount = MountSpec(type="lustre", source=LUSTRE.source, path=machine.place("fsx"))
    machine.failures = ["busy", "busy"]
    waited: list[float] = []
    prepare_mount(mount, tools=machine.tools, mounted=machine.mounted, interface="ens5", pause=waited.append)
    assert waited == [2.0, 4.0] and machine.mounted.at(mount.path)
    other = MountSpec(type="lustre", source=LUSTRE.source, path=machine.place("other"))
    machine.failures = ["no route"] * 20
    with pytest.raises(StepFailed, match="no route"):
        prepare_mount(other, tools=machine.tools, mounted=machine.mounted, interface="ens5", pause=waited.append)
    assert len(machine.failures) == 14


@pytest.mark.parametrize(
    ("kind", "missing", "hint"), [("lustre", "modinfo", "dnf install -y lustre-client"), ("nfs4", "mount.nfs4", "nfs-common")]
)
def test_a_missing_client_is_named_with_what_to_do(machine, kind, missing, hint):
    machine.missing = {missing}
    with pytest.raises(StepFailed, match=hint):
        prepare_mount(
            MountSpec(type=kind, source="s", path=machine.place("x")), tools=machine.tools, mounted=machine.mounted, interface=""
        )


def test_lustre_by_efa_sets_lnet_up_first_and_once(machine, tmp_path, monkeypatch):
    devices = tmp_path / "infiniband"
    for number in range(8):
        (devices / f"rdmap{number}s0").mkdir(parents=True)
    for _ in range(2):
        assert use_efa("ens5", run=machine.run, devices=devices) == "2 EFA interfaces"
    assert machine.nets == {"tcp": ["ens5"], "efa": ["rdmap0s0", "rdmap7s0"]}
    assert ("modprobe", "kefalnd", "ipif_name=ens5") in machine.commands
    assert machine.called("lnetctl").count(("lnetctl", "udsp", "add", "--src", "efa", "--priority", "0")) == 1
    monkeypatch.setattr("trainrun.node.mounts.use_efa", lambda interface, run: use_efa(interface, run=run, devices=devices))
    mount = MountSpec(type="lustre", source=LUSTRE.source, path=machine.place("fsx"), efa=True)
    assert "by 2 EFA interfaces" in prepare_mount(mount, tools=machine.tools, mounted=machine.mounted, interface="ens5").detail
    assert machine.fstab[2].split()[3] == "noatime,flock,noauto"  # at boot it would go by TCP


def test_lustre_never_goes_by_tcp_silently(machine, tmp_path):
    with pytest.raises(StepFailed, match="shows no EFA device"):
        use_efa("ens5", run=machine.run, devices=tmp_path / "none")
    devices = tmp_path / "infiniband"
    (devices / "rdmap0s0").mkdir(parents=True)
    machine.nets["efa"] = []
    machine.run = lambda *command: Machine.run(machine, *command) if "add" not in command else ""
    with pytest.raises(StepFailed, match="LNet shows 0 EFA interfaces after 1 were added; Lustre would go by TCP"):
        use_efa("ens5", run=machine.run, devices=devices)
    machine.missing = {"modprobe"}
    with pytest.raises(StepFailed, match="Set efa of the file system to false"):
        use_efa("ens5", run=machine.run, devices=devices)


def test_devices_for_lustre_are_spread_over_the_buses():
    names = [f"rdmap{bus}s{slot}" for bus in (113, 79, 96, 130, 147, 164, 181, 198) for slot in range(4)]
    assert choose(names) == [f"rdmap{bus}s0" for bus in (79, 96, 113, 130, 147, 164, 181, 198)]
    assert choose(["rdmap9s0", "rdmap10s0"]) == ["rdmap9s0", "rdmap10s0"]
    assert choose(["one"]) == ["one"]


def test_a_plain_node_gets_folders_and_is_told_so(tmp_path):
    storage = StorageSpec(
        location="s3://b", mounts=(LUSTRE,), volumes=(VolumeSpec(device="/dev/sdf", path="/data"),), instance_store="/scratch"
    )

    def never(*_: str) -> Any:
        raise AssertionError("a plain node asks nothing and mounts nothing")

    tools = Tools(run=never, packages=None)
    for changed in (True, False):
        steps = storage_steps(storage, places=Places(root=tmp_path), address="127.0.0.1", attached=never, tools=tools)
        done = [action() for _, action in steps]
        assert [name for name, _ in steps] == ["/scratch", "/data", "/fsx"]
        assert [one.detail.endswith("is a plain folder that stands in for a mount") for one in done] == [True] * 3
        assert [one.changed for one in done] == [changed] * 3
    assert all((tmp_path / name).is_dir() for name in ("fsx", "data", "scratch"))


def all_storage(machine: Machine) -> dict[str, Done]:
    """What an agent does for its storage, once."""
    storage = StorageSpec(
        location="s3://b",
        mounts=(MountSpec(type="lustre", source=LUSTRE.source, path=machine.place("fsx")),),
        volumes=(VolumeSpec(device="/dev/sdf", path=machine.place("data")),),
        instance_store=machine.place("scratch"),
    )
    steps = storage_steps(
        storage,
        places=Places(root=Path("/")),
        address="127.0.0.1",
        attached=lambda: {"/dev/sdf": "vol-0bb"},
        tools=machine.tools,
        mounted=machine.mounted,
    )
    return {name: action() for name, action in steps}


def test_all_storage_of_a_real_node_is_prepared_once_and_a_second_time_nothing_changes(machine):
    machine.add_disk(STORE)
    machine.add_disk(EBS, serial="vol0bb")
    done = all_storage(machine)
    names = [machine.place(name) for name in ("fsx", "data", "scratch")]
    assert list(done) == ["instance store", f"volume {names[1]}", f"mount {names[0]}"]
    assert all(one.changed for one in done.values())
    assert all(machine.mounted.at(name) for name in names)
    before, table = machine.fstab, (machine.folder / "mounts").read_text()
    assert not any(one.changed for one in all_storage(machine).values())
    assert (machine.fstab, (machine.folder / "mounts").read_text()) == (before, table)
    assert len(machine.called("mkfs.xfs")) == 2 and len(machine.called("mount")) == 3


def test_a_reboot_brings_all_storage_back(machine):
    for _ in range(2):
        machine.add_disk(STORE)
    machine.add_disk(EBS, serial="vol0bb")
    all_storage(machine)
    formatted, fstab = len(machine.called("mkfs.xfs")), machine.fstab
    machine.reboot()
    assert machine.mounted.at(machine.place("fsx")) and machine.mounted.at(machine.place("data"))  # by fstab alone
    done = all_storage(machine)
    assert machine.mounted.at(machine.place("scratch")) == "/dev/md127"
    assert len(machine.called("mkfs.xfs")) == formatted and machine.fstab == fstab
    assert [name for name, one in done.items() if one.changed] == ["instance store", f"mount {machine.place('fsx')}"]
    assert "tuned (6 of 6 parameters set)" in done[f"mount {machine.place('fsx')}"].detail  # lctl's settings die with the kernel


def test_lustre_by_efa_comes_back_by_the_agent_after_a_reboot(machine, tmp_path, monkeypatch):
    (tmp_path / "infiniband/rdmap0s0").mkdir(parents=True)
    devices = tmp_path / "infiniband"
    monkeypatch.setattr("trainrun.node.mounts.use_efa", lambda interface, run: use_efa(interface, run=run, devices=devices))
    mount = MountSpec(type="lustre", source=LUSTRE.source, path=machine.place("fsx"), efa=True)
    prepare_mount(mount, tools=machine.tools, mounted=machine.mounted, interface="ens5")
    machine.reboot()
    assert not machine.mounted.at(mount.path)  # mounted by the boot, it would go by TCP
    again = prepare_mount(mount, tools=machine.tools, mounted=machine.mounted, interface="ens5")
    assert again.changed and "by 1 EFA interfaces" in again.detail and machine.mounted.at(mount.path)


def test_a_failed_command_says_what_it_said():
    with pytest.raises(StepFailed, match="failed with status 3: no such thing"):
        run_command("sh", "-c", "echo no such thing >&2; exit 3")
    with pytest.raises(StepFailed, match="cannot be run"):
        run_command("/nonexistent/mount")


def test_ec2_tells_which_volume_is_which(aws):
    ec2 = aws.client("ec2")
    image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    (instance,) = ec2.run_instances(ImageId=image, MinCount=1, MaxCount=1)["Instances"]
    volume = ec2.create_volume(AvailabilityZone=instance["Placement"]["AvailabilityZone"], Size=10)["VolumeId"]
    ec2.attach_volume(Device="/dev/sdf", InstanceId=instance["InstanceId"], VolumeId=volume)
    assert attached_volumes(node=instance["InstanceId"], region="us-east-1")["/dev/sdf"] == volume
