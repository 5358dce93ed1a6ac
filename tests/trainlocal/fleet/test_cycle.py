"""A group of two nodes from the first boot over a kill to the last shutdown, in every tier that this machine allows."""

import pytest

from trainlocal.fleet.packages import RELEASE, PackagesMissing, prepare
from trainlocal.fleet.tiers import choose


@pytest.fixture
def seen(runner):
    """What `cycle.py` saw."""
    return runner.where_only_loopback_exists().run("cycle.py", seconds=150)


def test_nodes_boot_are_replaced_and_end(runner, seen):
    assert seen["tier"] == runner.tier
    identities = {node: (facts["instance_id"], facts["address"]) for node, facts in seen["facts"].items()}
    assert identities == {node: (node, address) for node, address in seen["addresses"].items()}
    assert len(set(seen["addresses"].values())) == 2
    assert all(facts["metadata_disabled"] is None for facts in seen["facts"].values())
    assert all(seen["pids_exist"])
    assert all(0 < seconds < 60 for seconds in seen["boot_seconds"])
    assert "cloud-init-output.log" in seen["logs"]

    first, second = seen["facts"]
    assert seen["greeted"][first] == second and seen["greeted"][second] == first  # they reach each other

    assert sorted(seen["managed"]) == sorted(seen["facts"])
    root = "/" if runner.tier != "plain" else str(runner.directory / "local")
    assert (seen["said"]["Status"], seen["said"]["ResponseCode"]) == ("Failed", 3)
    assert seen["said"]["StandardOutputContent"].startswith(root)
    assert seen["said"]["StandardErrorContent"] == "no such thing\n"
    assert (seen["leaves"]["Status"], seen["leaves"]["StandardOutputContent"]) == ("Success", "left\n")

    (replacement,) = set(seen["after_kill"]) - set(seen["facts"])
    survivor = ({first, second} - {seen["killed"]}).pop()
    assert set(seen["after_kill"]) == {survivor, replacement}
    assert seen["greeted"][replacement] == survivor

    assert set(seen["at_the_end"]) == {first, second, replacement}
    assert seen["at_the_end"][survivor] == seen["at_the_end"][replacement] == "terminated"

    if runner.tier != "plain":
        check_isolation(seen)


def test_nodes_boot_with_a_newer_cloud_init(make_runner, monkeypatch):
    """From 24.3 on its stages share one process."""
    monkeypatch.setenv(RELEASE, "trixie")
    try:
        prepare()
    except PackagesMissing as missing:
        pytest.skip(f"trixie's packages cannot be had here: {missing}")
    runner = make_runner(choose().tier)
    if runner.tier == "plain":
        pytest.skip("plain nodes have no cloud-init")
    seen = runner.where_only_loopback_exists().run("cycle.py", seconds=150)
    check_isolation(seen)
    logs = runner.directory / "local/nodes" / seen["killed"] / "cloud-init.log"
    assert "Cloud-init v. 25." in logs.read_text()


def check_isolation(seen):
    init = "systemd" if "with systemd" in seen["description"] else "python"
    for facts in seen["facts"].values():
        assert facts["first_process"] == init
        assert facts["host"] == f"ip-{facts['address'].replace('.', '-')}.ec2.internal" == facts["reverse"]
        assert facts["hostname"].split(".")[0] == facts["host"].split(".")[0]
        assert facts["interfaces"] == ["eth0", "lo"]
        assert facts["processes"] < 15  # its own, not the machine's
        assert len(facts["volumes"]) == 2 and facts["formatted"] == "xfs"
        assert facts["own_files"] == [facts["instance_id"]] and facts["instance_id"] in facts["shared_files"]
        assert "a folder of this node stands in for /dev/nvme1n1" in facts["mount_says"]
        assert "a folder of all nodes stands in for fs-1.fsx.us-east-1.amazonaws.com@tcp:/abc" in facts["mount_says"]
        assert "work" not in facts["root"] and {"etc", "opt", "usr", "var"} <= set(facts["root"])
    # The second one sees what the first has written to the shared file system.
    assert max(len(facts["shared_files"]) for facts in seen["facts"].values()) >= 2
    assert len({volume for facts in seen["facts"].values() for volume in facts["volumes"]}) == 4
    assert {"cloud-init.log", "console.log"} <= set(seen["logs"])
