"""Whatever is done to a cluster, its run comes to the same parameters, bit for bit, as one that nobody disturbs.

From the template's real user data, on isolated nodes. min_nodes is nodes: no step is taken by another number of ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from tests.end_to_end.faulted import SETTINGS, Faulted, faulted
from traincluster.command import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

INTERVAL = SETTINGS["training"]["checkpoint"]["every_steps"]
MOST_LOST = 2 * INTERVAL
"""Back to the newest commit, and what was trained until the save after it was complete."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulted]:
    directory = tmp_path_factory.mktemp("faulted")
    directory.chmod(0o755)
    with faulted(directory) as made:
        if made.tier == "plain":
            pytest.skip("plain nodes are processes on this machine: there is no node to lose, and no link of its own to cut")
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster: Faulted) -> str:
    """The digest of the parameters that the run comes to."""
    cluster.start("undisturbed")
    return cluster.finish()


def test_ela_09_faults_of_processes_and_of_what_is_around_them(cluster: Faulted, undisturbed: str) -> None:
    cluster.start("processes")
    worker = cluster.make("kill-worker")
    agent = cluster.make("kill-agent")
    hung = cluster.make("stop-rank", seconds=0)
    quiet = [cluster.make(fault, seconds=4, interrupts=False) for fault in ("rebalance", "metadata", "fill-disk")]
    assert cluster.finish() == undisturbed
    assert all(one.steps_lost <= MOST_LOST for one in (worker, agent, hung))
    assert all(one.steps_lost == 0 for one in quiet)
    told = [one["detail"] for one in cluster.events()]
    assert any("no progress for 8 s" in text and "stopped by a signal" in text for text in told)
    assert any("ebalance recommendation" in text and "asked to save at their next step" in text for text in told)
    assert any(key.startswith("failures/") for key in cluster.objects()), "the stacks of the hung ranks"


def test_ela_05_lost_nodes(cluster: Faulted, undisturbed: str) -> None:
    cluster.start("nodes")
    lost = [cluster.make("kill-node", node="other"), cluster.make("kill-host"), cluster.make("kill-all")]
    damaged = threading.Thread(target=main, args=(["chaos", "corrupt-payload", "--yes", "--seconds", "8"],))
    damaged.start()
    cluster.wait_for_damage()
    lost.append(cluster.make("kill-node", node="rank0", seconds=0))
    damaged.join()
    assert cluster.finish() == undisturbed
    assert all(one.steps_lost <= MOST_LOST for one in lost)
    refused = [one for one in cluster.events() if one["step"] == "bootstrap" and one["state"] == "failed"]
    assert all("sha256" in one["detail"] for one in refused)


def test_ela_03_notices_let_a_node_save_before_it_leaves(cluster: Faulted, undisturbed: str) -> None:
    cluster.start("notices")
    left = [cluster.make("spot-notice", seconds=60), cluster.make("terminate"), cluster.make("maintenance", seconds=0)]
    cut = cluster.make("cut-link", node="other", seconds=12)
    assert cluster.finish() == undisturbed
    assert [one.steps_lost for one in left] == [0, 0, 0], "who is given notice saves first"
    assert cut.steps_lost <= MOST_LOST
    summary = json.loads(cluster.read("summary.json"))
    assert summary["state"] == "succeeded"
    assert 0 < summary["goodput"]["goodput"] < 1
