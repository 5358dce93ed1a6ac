"""Two agents on loopback train a small job together, lose each other, and end together."""

from __future__ import annotations

import json
import os
import signal
import time

from trainrun.node.processes import descendants


def test_ela_05_lost_nodes_are_replaced_and_the_run_ends(cluster, group):
    cluster.wait_for_world(2)
    for victim in ("host", "other"):
        host = cluster.host()
        lost = host if victim == "host" else next(name for name in cluster.nodes if name != host)
        killed = time.time()
        cluster.nodes.pop(lost).kill()
        saved = int((cluster.shared / "saved").read_text())
        time.sleep(1.0)  # until the fleet notices
        replacement = group.lose(lost)
        alone = cluster.wait_for_world(1, since=killed)
        booted = time.time()
        cluster.boot(replacement)
        together = cluster.wait_for_world(2, since=booted)
        print(f"\n{victim} lost: alone after {alone - killed:.1f} s, with its replacement {together - booted:.1f} s after boot")
        assert min(entry["step"] for entry in cluster.trace() if entry["time"] > killed) >= saved

    (cluster.shared / "enough").touch()
    for node in cluster.nodes.values():
        assert node.process.wait(timeout=60) == 0, node.log()
        assert (node.events()[-1]["step"], node.events()[-1]["state"]) == ("finish", "done")
    result = json.loads(cluster.objects("result.json")["result.json"])
    assert (result["state"], result["steps"]) == ("succeeded", 1000)
    assert result["step"] == int((cluster.shared / "saved").read_text())
    assert (group.describe()["DesiredCapacity"], group.describe()["MinSize"], group.instances()) == (0, 0, [])
    # What a watcher of the run reads from the store is what the nodes wrote.
    for node in cluster.nodes.values():
        assert cluster.objects("nodes/")[f"nodes/{node.instance}.jsonl"].decode().splitlines() == [
            json.dumps(event) for event in node.events()
        ]
    sent = [line for data in cluster.objects("metrics/").values() for line in data.splitlines()]
    assert max(json.loads(line)["step"] for line in sent) == result["step"]


def test_a_crashed_rank_and_a_killed_agent_are_started_again(cluster):
    cluster.wait_for_world(2)
    host = cluster.nodes[cluster.host()]
    other = next(node for node in cluster.nodes.values() if node is not host)

    killed = time.time()
    os.kill(descendants(other.process.pid)[-1], signal.SIGKILL)  # supervisor > agent > torchrun > rank
    again = cluster.wait_for_world(2, since=killed + 1.0)
    print(f"\nrank killed: two ranks train again after {again - killed:.1f} s")
    failed = [event for event in other.events() if event["state"] == "failed"]
    assert [event["step"] for event in failed] == ["train"]
    assert "ranks with [-9]" in failed[0]["detail"]

    killed = time.time()
    agent = descendants(host.process.pid)[0]
    ranks = descendants(agent)
    os.kill(agent, signal.SIGKILL)
    again = cluster.wait_for_world(2, since=killed + 2.0)
    print(f"agent of the host killed: two ranks train again after {again - killed:.1f} s")
    assert not set(ranks) & set(descendants(host.process.pid))


def test_ela_09_a_spot_notice_saves_and_the_node_leaves(cluster, group):
    cluster.wait_for_world(2)
    leaving = cluster.nodes[cluster.host()]
    staying = next(node for node in cluster.nodes.values() if node is not leaving)

    noticed = time.time()
    leaving.metadata.items["spot/instance-action"] = '{"action": "terminate", "time": "2026-11-30T12:00:00Z"}'
    assert leaving.process.wait(timeout=60) == 0, leaving.log()
    alone = cluster.wait_for_world(1, since=noticed)
    print(f"\nspot notice: the survivor trains after {alone - noticed:.1f} s")
    together = [entry["step"] for entry in cluster.trace() if entry["world"] == 2]
    assert min(entry["step"] for entry in cluster.trace() if entry["world"] == 1) == max(together) + 1  # no step lost
    assert not [event for event in leaving.events() if event["state"] == "failed"]
    assert "spot interruption notice: terminate at 2026-11-30T12:00:00Z" in leaving.events()[-1]["detail"]

    # The last node is ended by scale-in: it saves and leaves, which is no failure and no result.
    last = staying.events()
    client = group.aws.client("autoscaling")
    client.update_auto_scaling_group(AutoScalingGroupName=group.name, MinSize=0, DesiredCapacity=0)
    staying.process.terminate()
    assert staying.process.wait(timeout=60) == 0, staying.log()
    assert [event["state"] for event in staying.events()[len(last) :]] == ["done"]
    assert cluster.objects("result.json") == {}
