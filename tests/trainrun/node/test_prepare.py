"""Preparing a node as a whole: its sub-steps in order, timed, told and done once; the clock, huge pages and limits among them."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainrun.node import lustre, prepare
from trainrun.node.clock_service import ensure_clock_service
from trainrun.node.host import INITIAL_PID_NAMESPACE, has_own_kernel
from trainrun.node.huge_pages import PAGES, reserve_huge_pages
from trainrun.node.numa import Topology
from trainrun.node.outcome import StepFailed
from trainrun.node.places import Places
from trainrun.node.substeps import Done, SubSteps
from trainrun.node.tools import Tools
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec

CLUSTER = ClusterSpec(name="c", instance_type="c7i.large", nodes_min=1, nodes_desired=1, nodes_max=1)
SPEC = RunSpec(
    run="r",
    region="us-east-1",
    cluster=CLUSTER,
    job=JobSpec(entry_point="train.py"),
    storage=StorageSpec(location="s3://b", instance_store="/scratch"),
)


def prepared(root: Path, spec: RunSpec = SPEC) -> str:
    (root / "etc/traincluster").mkdir(parents=True, exist_ok=True)
    return prepare.prepare(spec=spec, places=Places(root=root), node="i-1", address="127.0.0.1", attached=dict)


def names(told: str) -> list[str]:
    """The sub-steps of a report, each of which has its seconds."""
    found = re.findall(r"(?:^|; )([^;:]+?) \d+\.\d\d s: ", told)
    assert len(found) == told.count(" s: "), told
    return found


def test_the_sub_steps_are_told_in_order_and_a_second_time_nothing_changes(tmp_path):
    first, second = prepared(tmp_path), prepared(tmp_path)
    assert names(first) == ["folders", "limits", "huge pages", "/scratch", "NUMA", "CloudWatch agent"]
    assert names(second) == names(first)
    assert first.endswith(" Changed: folders, /scratch.")
    assert second.endswith(" Nothing had to be changed.")


def test_a_real_node_has_all_of_them_and_upgrades_stop_before_anything_is_installed(tmp_path, monkeypatch):
    """As on an EC2 instance, with each sub-step replaced: none may touch this machine."""
    done: list[str] = []

    def stand_in(name: str) -> Any:
        def act(*_: object, **__: object) -> Done:
            done.append(name)
            return Done(name)

        return act

    monkeypatch.setattr(prepare, "has_own_kernel", lambda _: True)
    monkeypatch.setattr(prepare, "packages_here", lambda: None)
    for name in ("make_folders", "raise_limits", "stop_upgrades", "ensure_clock_service", "reserve_huge_pages", "configure"):
        monkeypatch.setattr(prepare, name, stand_in(name))
    for name in ("prepare_instance_store", "prepare_binding"):
        monkeypatch.setattr(prepare, name, stand_in(name))
    told = prepare.prepare(spec=SPEC, places=Places(root=Path("/")), node="i-1", address="127.0.0.1", attached=dict)
    order = ["folders", "limits", "upgrades", "clock", "huge pages", "instance store", "NUMA", "CloudWatch agent"]
    assert names(told) == order
    assert done.index("stop_upgrades") < done.index("ensure_clock_service") < done.index("prepare_instance_store")


def test_a_sub_step_that_fails_is_named_with_what_was_done_before_it():
    moments = iter([0.0, 0.25, 1.0, 4.5])
    steps = SubSteps(clock=lambda: next(moments))
    steps.run("limits", lambda: Done("open files 20"))

    def fail() -> Done:
        raise StepFailed("mount -t lustre failed with status 5: no route. Open the ports.")

    with pytest.raises(StepFailed) as failure:
        steps.run("mount /fsx", fail)
    assert str(failure.value) == (
        "mount /fsx failed after 3.50 s: mount -t lustre failed with status 5: no route. Open the ports.\n"
        "Before it: limits 0.25 s: open files 20."
    )


def test_efa_without_unlimited_locked_memory_fails_in_its_sub_step(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_raise_limit", lambda *_: 8192)
    with pytest.raises(StepFailed, match=r"limits failed after .* 8192 bytes of memory can be locked.*LimitMEMLOCK=infinity"):
        prepared(tmp_path, replace(SPEC, cluster=replace(CLUSTER, efa_interfaces=4)))


@pytest.mark.parametrize(
    ("root", "namespace", "systemd", "own"),
    [
        ("/", INITIAL_PID_NAMESPACE, True, True),
        ("/", "pid:[4026532177]", True, False),  # a container, or a local node under systemd
        ("/", INITIAL_PID_NAMESPACE, False, False),
        ("/", None, True, False),  # no /proc
        ("/tmp/node", INITIAL_PID_NAMESPACE, True, False),  # a plain process
    ],
)
def test_the_kernel_is_a_nodes_own_only_on_a_host(root, namespace, systemd, own, tmp_path):
    if namespace:
        (tmp_path / "pid").symlink_to(namespace)
    if systemd:
        (tmp_path / "systemd").mkdir()
    found = has_own_kernel(Places(root=Path(root)), namespace=tmp_path / "pid", systemd=tmp_path / "systemd")
    assert found is own


class Kernel:
    """A /proc that reserves as many huge pages as it is told, if it has the memory."""

    def __init__(self, folder: Path, *, reserved: int = 0) -> None:
        self.folder = folder
        (folder / "sys/vm").mkdir(parents=True)
        self.setting = folder / "sys/vm/nr_hugepages"
        self.setting.write_text(f"{reserved}\n")
        self.tell(reserved)

    def tell(self, reserved: int) -> None:
        (self.folder / "meminfo").write_bytes(b"MemTotal: 1 kB\nHugePages_Total: %7d\nHugepagesize:    2048 kB\n" % reserved)


def test_huge_pages_are_reserved_for_efa_on_a_host_that_has_none(tmp_path, monkeypatch):
    kernel = Kernel(tmp_path)
    monkeypatch.setattr(Path, "write_text", lambda path, text, **_: kernel.tell(int(text)) if path == kernel.setting else 0)
    assert reserve_huge_pages(efa=True, own_kernel=True, proc=tmp_path) == Done(f"{PAGES} of 2 MiB reserved", changed=True)
    assert reserve_huge_pages(efa=True, own_kernel=True, proc=tmp_path) == Done(f"{PAGES} of 2 MiB reserved by the image")


@pytest.mark.parametrize(
    ("efa", "own_kernel", "reserved", "told"),
    [
        (False, True, 0, "none needed without EFA"),
        (True, True, 512, "512 of 2 MiB reserved by the image"),
        (True, False, 0, "none reserved, and the kernel is not this node's alone"),
    ],
)
def test_huge_pages_of_others_are_never_set(efa, own_kernel, reserved, told, tmp_path):
    kernel = Kernel(tmp_path, reserved=reserved)
    assert reserve_huge_pages(efa=efa, own_kernel=own_kernel, proc=tmp_path) == Done(told)
    assert kernel.setting.read_text() == f"{reserved}\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="a file that root may not write is shown by a folder in its place")
def test_a_kernel_that_does_not_let_itself_be_set_stops_nobody(tmp_path):
    kernel = Kernel(tmp_path)
    kernel.setting.unlink()
    kernel.setting.mkdir()
    assert reserve_huge_pages(efa=True, own_kernel=True, proc=tmp_path) == Done("none reserved: Is a directory")


class Clock:
    """systemctl and the search path of a node."""

    def __init__(self, *, running: str = "", there: str = "", installs: bool = False, fails: bool = False) -> None:
        self.running, self.there, self.installs, self.fails = running, there, installs, fails
        self.ran: list[tuple[str, ...]] = []

    def __call__(self, *command: str, **_: Any) -> str:
        self.ran.append(command)
        if command[0] == "sh" and not self.there:
            raise StepFailed("no chronyd")
        if command[:2] == ("systemctl", "list-units"):
            return f"{self.running} loaded active running a clock\n" if self.running else ""
        if command[:2] == ("systemctl", "list-unit-files"):
            return f"{self.there} disabled enabled\n" if self.there else ""
        if command[:2] == ("systemctl", "enable"):
            if self.fails:
                raise StepFailed("systemctl enable failed with status 1")
            self.running = command[-1]
        return ""


def test_a_clock_that_is_kept_is_left_alone():
    clock = Clock(running="chronyd.service")
    assert ensure_clock_service(Tools(run=clock, packages=None)) == Done("chronyd.service keeps it")
    assert len(clock.ran) == 1


@pytest.mark.parametrize("unit", ["chrony.service", "chronyd.service"])
def test_a_clock_that_nothing_keeps_gets_the_images_chrony(unit):
    clock = Clock(there=unit)
    assert ensure_clock_service(Tools(run=clock, packages=None)) == Done(f"{unit} started", changed=True)
    assert ensure_clock_service(Tools(run=clock, packages=None)) == Done(f"{unit} keeps it")


def test_a_node_whose_clock_nothing_can_keep_says_so_and_trains():
    assert ensure_clock_service(Tools(run=Clock(), packages=None)).detail.startswith("nothing keeps it: The image has no chronyd")
    failing = Clock(there="chrony.service", fails=True)
    assert "systemctl enable failed" in ensure_clock_service(Tools(run=failing, packages=None)).detail


def test_numactl_is_there_where_ranks_can_be_bound(monkeypatch):
    ran: list[tuple[str, ...]] = []

    def run(*command: str, **_: Any) -> str:
        ran.append(command)
        return ""

    two = Topology({0: frozenset({0}), 1: frozenset({1})}, (0, 1))
    monkeypatch.setattr(prepare, "read_topology", lambda: two)
    tools = Tools(run=run, packages=None)
    assert prepare.prepare_binding(SPEC, tools=tools) == Done("2 NUMA nodes, GPUs at 0, 1")
    assert ran[0][0] == "sh"
    none = replace(SPEC, job=replace(SPEC.job, numa="none"))
    assert "nothing to bind" in prepare.prepare_binding(none, tools=tools).detail
    monkeypatch.setattr(prepare, "read_topology", lambda: replace(two, gpus=()))
    assert "nothing to bind" in prepare.prepare_binding(SPEC, tools=tools).detail
    assert len(ran) == 1


class Lctl:
    """A Lustre client's parameters; some are unknown to it."""

    def __init__(self, *unknown: str) -> None:
        self.unknown, self.values, self.set = unknown, dict.fromkeys(lustre.TUNING, "8"), []

    def __call__(self, *command: str, **_: Any) -> str:
        if command[1] == "get_param":
            if command[-1] in self.unknown:
                raise StepFailed("error: get_param: no such parameter")
            return f"{self.values[command[-1]]}\n" * 4  # one line for each server
        if command[1] == "set_param":
            self.set.append(command[2])
            self.values.update([command[2].split("=")])
        return ""


def test_lustre_is_tuned_once_and_fewer_modifying_requests_than_requests_are_allowed():
    lctl = Lctl()
    assert lustre.tune(lctl) == ("tuned (6 of 6 parameters set)", True)
    assert lctl.set.index("mdc.*.max_rpcs_in_flight=64") < lctl.set.index("mdc.*.max_mod_rpcs_in_flight=50")
    assert lustre.tune(lctl) == ("tuned already", False)
    assert len(lctl.set) == 6


def test_a_lustre_client_that_lacks_a_parameter_or_lctl_is_used_as_it_is():
    assert lustre.tune(Lctl("osc.*.max_dirty_mb")) == ("tuned (5 of 6 parameters set), not taken: osc.*.max_dirty_mb", True)

    def none(*_: str, **__: Any) -> str:
        raise StepFailed("lctl cannot be run")

    assert lustre.tune(none) == ("not tuned: the image has no lctl", False)


def test_lustre_modules_get_more_threads_on_large_nodes_only(tmp_path):
    file = tmp_path / "modprobe.d/lustre.conf"
    assert not lustre.write_module_options(processors=8, file=file) and not file.exists()
    assert lustre.write_module_options(processors=96, file=file)
    assert file.read_text() == "options ptlrpc ptlrpcd_per_cpt_max=32\noptions ksocklnd credits=2560\n"
    assert not lustre.write_module_options(processors=96, file=file)
