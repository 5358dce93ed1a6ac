"""How a run ends: one result for all nodes, a summary, one message, and nodes that are kept for so long."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace

import pytest
from botocore.exceptions import BotoCoreError

from trainrun.__main__ import main
from trainrun.directory import DirectoryStore
from trainrun.node.finish import asked_to_end, finish
from trainrun.node.keep import carry_out, keep, kept_until
from trainrun.node.metric_files import MetricFiles
from trainrun.node.notify import message, notify, subject
from trainrun.node.outcome import Outcome, Signalled
from trainrun.node.result import End, Result, digest
from trainrun.node.summary import cause_of, summarize
from trainrun.spec import ClusterSpec, JobSpec, MonitoringSpec, RunSpec, ShutdownSpec, StorageSpec
from trainrun.store import StoreError

SPEC = RunSpec(
    run="llama",
    region="us-east-1",
    cluster=ClusterSpec(name="Stack/Cluster", instance_type="p5.48xlarge", nodes_min=1, nodes_desired=2, nodes_max=2),
    job=JobSpec(entry_point="train.py"),
    storage=StorageSpec(location="s3://bucket"),
    monitoring=MonitoringSpec(log_group="logs"),
)
FAILED = Outcome(state="failed", reason="The job failed 2 times in the same way at step 7.")


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path / "store")


class FakeGroup:
    def __init__(self, store=None, nodes=("i-1", "i-2")):
        self._store, self.nodes, self.scaled, self.result_when_scaled = store, set(nodes), 0, None

    def members(self):
        return self.nodes

    def look(self):
        class View:
            desired = 0 if self.scaled else 2

        return View()

    def scale_to_zero(self):
        self.scaled += 1
        if self._store is not None:
            self.result_when_scaled = json.loads(self._store.get("result.json"))


def result_of(store, node="i-1", *, group=None, spec=SPEC, seen=None):
    return Result(store=store, node=node, document=digest(spec), members=(group or FakeGroup()).members, seen=seen)


def finished(store, tmp_path, state, *, group=None, node="i-1", spec=SPEC, **shutdown):
    group = group or FakeGroup(store)
    spec = replace(spec, shutdown=ShutdownSpec(**shutdown))
    return finish(
        Outcome(state=state, reason="because"),
        spec=spec,
        store=store,
        result=result_of(store, node, group=group, spec=spec),
        metric_files=MetricFiles(folder=tmp_path, store=store, node=node),
        group=group,
    )


class TestFinish:
    def test_success_is_durable_before_the_group_goes(self, store, tmp_path):
        (tmp_path / "1-00001.jsonl").write_text('{"step": 9, "steps": 9}\n')
        group = FakeGroup(store)
        end, text = finished(store, tmp_path, "succeeded", group=group)
        assert text == "succeeded; the group is scaled to zero"
        result = group.result_when_scaled
        assert {name: result[name] for name in ("state", "step", "steps", "node", "reason", "then")} == {
            "state": "succeeded",
            "step": 9,
            "steps": 9,
            "node": "i-1",
            "reason": "because",
            "then": "scale_to_zero",
        }
        assert (end.number, result["nodes"], json.loads(store.get("summary.json"))["state"]) == (1, ["i-1", "i-2"], "succeeded")

    def test_a_failure_keeps_the_group_for_so_long_unless_told_otherwise(self, store, tmp_path):
        group = FakeGroup(store)
        end, text = finished(store, tmp_path, "failed", group=group, keep_minutes=90)
        assert end.keep_until == pytest.approx(end.time + 5400)
        assert "the group is kept until" in text and "trainrun keep --minutes" in text and not group.scaled
        store.delete(["result.json"])
        end, text = finished(store, tmp_path, "failed", group=group, keep_minutes=None, on_success="keep")
        assert (end.then, end.keep_until, text) == ("keep", None, "failed; the group is kept until somebody ends it")
        store.delete(["result.json"])
        assert finished(store, tmp_path, "failed", group=group, on_failure="scale_to_zero")[0].then == "scale_to_zero"
        assert group.scaled == 1

    def test_one_node_tells_and_only_once_the_group_goes(self, store, tmp_path, monkeypatch):
        told, group = [], FakeGroup(store)

        def summarize_slowly(*_, **__):
            told.append(group.scaled)
            signal.raise_signal(signal.SIGTERM)  # the node is shut down, for the group goes
            return {"state": "succeeded"}

        def leave(*_):
            raise Signalled("asked to stop")

        monkeypatch.setattr("trainrun.node.finish.summarize", summarize_slowly)
        before = signal.signal(signal.SIGTERM, leave)
        try:
            with pytest.raises(Signalled):
                finished(store, tmp_path, "succeeded", group=group)
        finally:
            signal.signal(signal.SIGTERM, before)
        assert store.get("summary.json")
        end, _ = finished(store, tmp_path, "succeeded", group=group, node="i-2")
        assert (told, end.node, group.scaled) == ([1], "i-1", 2)

    def test_people_are_told_although_the_group_cannot_be_scaled(self, store, tmp_path):
        class Stuck(FakeGroup):
            def scale_to_zero(self):
                raise BotoCoreError

        with pytest.raises(BotoCoreError):
            finished(store, tmp_path, "succeeded", group=Stuck(store))
        assert store.get("summary.json")

    def test_a_run_that_stops_for_its_capacity_is_never_kept(self, store, tmp_path):
        assert finished(store, tmp_path, "stopped", on_success="keep")[0].then == "scale_to_zero"

    def test_a_store_that_fails_for_a_while_is_waited_for(self, store, tmp_path, monkeypatch):
        monkeypatch.setattr("trainrun.node.finish.time.sleep", lambda _: None)
        put, failures = DirectoryStore.put, [StoreError("not yet")] * 3

        def put_later(self, key, data, **options):
            if failures:
                raise failures.pop()
            put(self, key, data, **options)

        monkeypatch.setattr(DirectoryStore, "put", put_later)
        assert finished(store, tmp_path, "succeeded")[0].state == "succeeded"

    def test_a_person_stops_the_whole_run_by_the_stop_file(self, tmp_path):
        file = tmp_path / "stop"
        assert asked_to_end(file) == ""
        file.write_text("90 seconds left; spot interruption notice")
        assert asked_to_end(file) == ""
        file.write_text("End the run: the data is wrong\n")
        assert asked_to_end(file) == "the data is wrong"
        file.write_text("30 seconds left; end the run: the data is wrong; spot interruption notice")
        assert asked_to_end(file) == "the data is wrong; spot interruption notice"
        file.write_text("30 end the run")
        assert asked_to_end(file) == "by hand"


class TestResult:
    def test_of_nodes_that_end_at_once_the_first_counts_for_all(self, store):
        first, second = result_of(store, "i-1"), result_of(store, "i-2")
        store_empty = second.end()
        one = first.write(FAILED, shutdown=ShutdownSpec(), last_step=(7, 9))
        store.delete(["result.json"])  # as second saw it: the first has not come so far
        two = second.write(Outcome(state="succeeded", reason="Done."), shutdown=ShutdownSpec(), last_step=None)
        assert (store_empty, two) == (None, one)
        assert json.loads(store.get("result.json"))["state"] == "failed"

    def test_an_end_is_heard_by_those_that_took_part_and_by_who_comes_to_them(self, store):
        result_of(store).write(FAILED, shutdown=ShutdownSpec(), last_step=None)
        assert "has failed, says i-1" in result_of(store, "i-2").ended()
        assert result_of(store, "i-3", group=FakeGroup(nodes=["i-2", "i-3"])).broken()  # replaces i-1 while i-2 is kept

    def test_a_run_that_is_started_again_does_not_take_the_last_end_for_its_own(self, store):
        result_of(store).write(FAILED, shutdown=ShutdownSpec(), last_step=None)
        new = FakeGroup(nodes=["i-8", "i-9"])
        assert result_of(store, "i-8", group=new).end() is None  # all nodes are new
        other = replace(SPEC, payload_sha256="other")
        assert result_of(store, "i-1", spec=other).end() is None  # deployed again with other code
        again = result_of(store, "i-8", group=new)
        assert again.write(FAILED, shutdown=ShutdownSpec(), last_step=None).number == 2

    def test_clocks_that_differ_make_no_two_ends_of_one(self, store, monkeypatch):
        slow, other = result_of(store, "i-1"), result_of(store, "i-2")
        assert other.end() is None
        with monkeypatch.context() as patch:
            patch.setattr("trainrun.node.result.time.time", lambda: 1e9)
            one = slow.write(FAILED, shutdown=ShutdownSpec(), last_step=None)
        store.delete(["result.json"])
        assert other.write(FAILED, shutdown=ShutdownSpec(), last_step=None) == one

    def test_success_elsewhere_does_not_cut_short_what_is_about_to_succeed_here(self, store):
        result_of(store).write(Outcome(state="succeeded", reason="Done."), shutdown=ShutdownSpec(), last_step=None)
        assert result_of(store, "i-2").ended() and not result_of(store, "i-2").broken()

    def test_a_record_of_another_version_says_nothing(self, store):
        store.put("result.json", b'{"state": "failed", "time": 1, "reason": "", "node": "i-1", "step": 0, "steps": 0, "x": 1}')
        assert result_of(store).end() is None


class TestKeep:
    def end(self, store, **shutdown):
        return result_of(store).write(FAILED, shutdown=ShutdownSpec(**shutdown), last_step=None)

    def test_kept_nodes_are_ended_when_the_time_is_over_whichever_lives(self, store):
        end, group = self.end(store, keep_minutes=1), FakeGroup()
        now = iter([end.time + 30, end.time + 59, end.time + 61])
        assert keep(end, store=store, group=group, poll=0.0, clock=lambda: next(now))
        assert group.scaled == 1
        # A node whose agent, or whole machine, was started again finds the same moment in the store.
        again = result_of(store, "i-2").end()
        assert kept_until(store, again) == end.keep_until

    def test_a_person_may_lengthen_and_end_it(self, store, tmp_path, monkeypatch, capsys):
        spec = replace(SPEC, storage=StorageSpec(location=store.url.rpartition("/")[0]), run=store.url.rpartition("/")[2])
        (tmp_path / "etc/traincluster").mkdir(parents=True)
        (tmp_path / "etc/traincluster/run.json").write_text(spec.to_json())
        monkeypatch.setenv("TRAINCLUSTER_ROOT", str(tmp_path))
        assert main(["keep", "--minutes", "10"]) == 1
        assert "the run has not ended" in capsys.readouterr().err
        end = self.end(store)
        assert main(["keep", "--minutes", "600"]) == 0
        assert kept_until(store, end) == pytest.approx(time.time() + 36000, abs=60)
        assert "are kept until" in capsys.readouterr().out
        assert main(["keep", "--minutes", "0"]) == 0
        group = FakeGroup()
        assert keep(end, store=store, group=group, poll=0.0) and group.scaled == 1
        assert kept_until(store, replace(end, number=2)) == end.keep_until  # the word was of another end

    @pytest.mark.parametrize(
        "word",
        [
            b"[]",
            b'"tomorrow"',
            b'{"number": 1}',
            *(b'{"number": 1, "until": %s}' % until for until in (b"null", b'"tomorrow"', b"[]", b"NaN", b"Infinity")),
            b"{",
            b"\xff",
        ],
    )
    def test_an_odd_word_keeps_no_node_longer(self, store, caplog, word):
        end, group = self.end(store, keep_minutes=1), FakeGroup()
        store.put("keep.json", word)
        now = iter([end.time + 30, end.time + 59, end.time + 61])
        assert keep(end, store=store, group=group, poll=0.0, clock=lambda: next(now))
        assert caplog.text.count("is passed over") == 1

    def test_deleting_the_result_starts_the_run_again(self, store):
        end, group = self.end(store), FakeGroup()
        store.delete(["result.json"])
        assert not keep(end, store=store, group=group, poll=0.0)
        assert not group.scaled

    def test_any_node_scales_to_zero_what_the_one_that_ended_the_run_could_not(self, store):
        end, group = self.end(store, on_failure="scale_to_zero"), FakeGroup()
        assert carry_out(end, store=store, group=group) and carry_out(end, store=store, group=group)
        assert group.scaled == 1

    def test_a_store_that_fails_keeps_no_node_longer(self, store, monkeypatch):
        end, group = self.end(store, keep_minutes=1), FakeGroup()
        monkeypatch.setattr(DirectoryStore, "get", lambda *_: (_ for _ in ()).throw(StoreError("gone")))
        assert keep(end, store=store, group=group, poll=0.0, clock=lambda: end.time + 61)
        assert group.scaled == 1


def test_the_summary_is_of_all_nodes_since_the_last_start(store):
    def event(node, moment, step, state, detail=""):
        return json.dumps({"time": moment, "node": node, "address": "10.0.0.1", "step": step, "state": state, "detail": detail})

    old = event("i-1", 50.0, "train", "failed", "Rank 0 made no progress for 60 s.")
    said = "torchrun ended with exit code 1, ranks with [1]:\nTraceback\nValueError: no"
    store.put("nodes/i-1.jsonl", "\n".join([old, event("i-1", 110.0, "train", "failed", said), '{"torn']).encode())
    store.put("nodes/i-2.jsonl", event("i-2", 105.0, "meet", "done").encode())
    store.put("metrics/i-1-1.jsonl", b'{"step": 7, "steps": 9, "tokens": 700, "loss": 2.5}\n{"event": "committed"}\n')
    store.put("failures/i-1/a-rank-0.txt", b"stack")
    first = End(state="failed", reason="x", time=100.0, node="i-1")
    store.put("ends/000001.json", first.to_json())
    summary = summarize(store, End(state="failed", reason="why", time=120.0, node="i-1", step=7, steps=9, number=2), run="llama")
    assert (summary["wall_seconds"], summary["restarts"], summary["tokens"]) == (15.0, {"crash": 1}, 700)
    assert [node["node"] for node in summary["nodes"]] == ["i-2", "i-1"]
    assert summary["last_lines"][-1] == "ValueError: no"
    assert summary["failures"] == [store.locate("failures/i-1/a-rank-0.txt")]
    assert summary["checkpoint"] is None


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        ("Rank 1 made no progress for 60 s at step 3.", "hang"),
        ("The rendezvous host i-1 is gone. The nodes meet anew.", "loss of the rendezvous host"),
        ("The ranks saved and left (exit code 75) because a peer was asked to stop.", "a node that left"),
        ("mpirun ended with exit code 1, ranks with [1]:", "crash"),
        ("The run has failed, says i-1: x", "other"),
    ],
)
def test_causes_of_restarts(detail, cause):
    assert cause_of(detail) == cause


class TestNotify:
    @pytest.fixture
    def topic(self, aws):
        """A topic with a queue behind it, and what has come to it."""
        sns, sqs = (aws.client(name) for name in ("sns", "sqs"))
        arn = sns.create_topic(Name=aws.bucket)["TopicArn"]
        queue = sqs.create_queue(QueueName=aws.bucket)["QueueUrl"]
        address = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        sns.subscribe(TopicArn=arn, Protocol="sqs", Endpoint=address)

        def received():
            answer = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)
            return [json.loads(one["Body"]) for one in answer.get("Messages", [])]

        return arn, received

    def spec(self, topic):
        return replace(SPEC, monitoring=MonitoringSpec(topic=topic))

    def end(self, **fields):
        return End(**{"state": "failed", "reason": "It broke.", "time": 1e9, "node": "i-1", "nodes": ("i-1", "i-2"), **fields})

    def test_one_message_an_end_whoever_sends_it(self, store, topic):
        arn, received = topic
        end = self.end(then="keep", keep_until=1e9, step=7, steps=9)
        assert notify(end, spec=self.spec(arn), store=store, summary={}) == "the topic was notified"
        assert notify(end, spec=self.spec(arn), store=store, summary={}) == ""
        assert notify(self.end(number=2), spec=self.spec(arn), store=store, summary={}) == "the topic was notified"
        assert sorted(one["Subject"] for one in received()) == [
            "Traincluster: llama has failed",
            "Traincluster: llama has failed at step 7 of 9",
        ]

    def test_a_topic_that_is_not_there_is_a_remark(self, store, aws):
        gone = "arn:aws:sns:us-east-1:123456789012:gone"
        assert notify(self.end(), spec=self.spec(gone), store=store, summary={}).startswith("nobody could be notified (")
        assert notify(self.end(), spec=SPEC, store=store, summary={}) == ""

    def test_the_message_says_what_why_where_what_it_costs_and_how_to_undo_it(self, store):
        summary = {
            "wall_seconds": 3661.2,
            "restarts": {"crash": 2},
            "checkpoint": {"step": 5, "url": "s3://bucket/llama/step-000000005"},
            "failures": ["x"],
        }
        end = self.end(then="keep", keep_until=1766575800.0, step=7, steps=9)
        text = message(end, spec=SPEC, store=store, summary=summary)
        for part in (
            "The run llama on Stack/Cluster (us-east-1) has failed at step 7 of 9 after 1:01:01, with 2 restarts on the way.",
            "Why: It broke.",
            "The last checkpoint is of step 5: s3://bucket/llama/step-000000005",
            "summary.json",
            "2 nodes of p5.48xlarge are kept for you to look at until 2025-12-24 11:30 UTC, and are ended then.",
            "on any of them: sudo /opt/traincluster/bin/trainrun keep --minutes 240",
            "delete s3://bucket/llama/result.json",
        ):
            assert part in text
        gone = message(self.end(state="stopped"), spec=SPEC, store=store, summary={})
        assert "nothing but storage" in gone and "scale the Auto Scaling group up again" in gone

    def test_a_subject_is_what_sns_takes(self):
        text = subject(self.end(step=1, steps=2), replace(SPEC, run="läuft" + "x" * 120))
        assert len(text) == 100 and text.isascii()
