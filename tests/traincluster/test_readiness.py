"""How a deploy waits for its nodes, what they may and are told for it, and who hears of a run's end."""

from __future__ import annotations

import json

import aws_cdk as cdk
import pytest
from aws_cdk import aws_sns as sns
from cdk_nag import AwsSolutionsChecks
from cfnlint.api import ManualArgs, lint

from tests.traincluster.conftest import JOB, Synthesized
from traincluster import NotificationTopic, Readiness, TrainingJob
from trainrun.spec import ShutdownSpec

GROUP, HANDLE, CONDITION = (
    "AWS::AutoScaling::AutoScalingGroup",
    "AWS::CloudFormation::WaitConditionHandle",
    "AWS::CloudFormation::WaitCondition",
)


def statements(cluster):
    return [
        statement
        for policy in cluster.resources("AWS::IAM::Policy").values()
        for statement in policy["Properties"]["PolicyDocument"]["Statement"]
    ]


def endpoints(cluster):
    return {
        json.dumps(one["Properties"]["ServiceName"]).rpartition(".")[2].strip('"]} ')
        for one in cluster.resources("AWS::EC2::VPCEndpoint").values()
    }


def document(cluster):
    """The RunSpec in the user data, with references as "REFERENCE"."""
    text = cluster.user_data
    start = text.index("RUN_JSON'\n") + len("RUN_JSON'\n")
    return json.loads(text[start : text.index("\nRUN_JSON", start)])


def test_by_default_a_deploy_waits_for_no_node(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    group = cluster.only(GROUP)
    assert "CreationPolicy" not in group
    assert group["UpdatePolicy"]["AutoScalingRollingUpdate"] == {"MaxBatchSize": 2, "MinInstancesInService": 0}
    assert cluster.resources(CONDITION) == {} and "readiness" not in document(cluster)


def test_signals_are_waited_for_by_the_group_and_allowed_to_the_nodes(synthesize):
    readiness = Readiness.signal(timeout_minutes=45)
    cluster = synthesize(readiness=readiness, nodes=4, min_nodes=3, network={"isolated": True})
    (name,) = cluster.resources(GROUP)
    group = cluster.only(GROUP)
    assert group["CreationPolicy"] == {"ResourceSignal": {"Count": 3, "Timeout": "PT45M"}}
    assert group["UpdatePolicy"]["AutoScalingRollingUpdate"] == {
        "MaxBatchSize": 4,
        "MinInstancesInService": 0,
        "MinSuccessfulInstancesPercent": 75,
        "PauseTime": "PT45M",
        "WaitOnResourceSignals": True,
    }
    assert document(cluster)["readiness"] == {"way": "signal", "stack": "Stack", "resource": name}
    (allowed,) = [one for one in statements(cluster) if one["Action"] == "cloudformation:SignalResource"]
    assert allowed["Resource"] == {"Ref": "AWS::StackId"}
    assert "cloudformation" in endpoints(cluster)


def test_a_wait_condition_has_a_handle_of_its_own_for_each_document(synthesize):
    clusters = [
        synthesize(readiness=Readiness.wait_condition(timeout_minutes=20), job=job, network={"isolated": True})
        for job in (JOB, JOB, TrainingJob(run="other", configuration=dict(JOB.configuration)))
    ]
    names = [[*cluster.resources(HANDLE), *cluster.resources(CONDITION)] for cluster in clusters]
    assert names[0] == names[1] != names[2]
    cluster, (handle, _) = clusters[0], names[0]
    (group,) = cluster.resources(GROUP)
    condition = cluster.only(CONDITION)
    assert condition["Properties"] == {"Count": 2, "Handle": {"Ref": handle}, "Timeout": "1200"}
    assert condition["DependsOn"] == [group]
    assert document(cluster)["readiness"] == {"way": "wait_condition", "url": "REFERENCE"}
    assert "cloudformation" not in endpoints(cluster)  # its URL is S3's
    assert not [one for one in statements(cluster) if "cloudformation:SignalResource" in one["Action"]]


@pytest.mark.parametrize(("way", "minutes"), [("signal", 0), ("signal", 61), ("wait_condition", 721)])
def test_times_that_cloudformation_does_not_take_are_refused(way, minutes):
    with pytest.raises(ValueError, match=f"readiness waits for {minutes} minutes. Allowed for '{way}': 1 to "):
        getattr(Readiness, way)(timeout_minutes=minutes)


def test_a_deploy_without_nodes_cannot_wait_for_them(synthesize):
    with pytest.raises(ValueError, match="readiness is 'signal', but start_nodes is false"):
        synthesize(readiness=Readiness.signal(), start_nodes=False)


class TestNotifications:
    @pytest.fixture(scope="class")
    @classmethod
    def cluster(cls, tmp_path_factory):
        return with_topic(tmp_path_factory.mktemp("assembly"), network={"isolated": True}, readiness=Readiness.signal())

    def test_nodes_may_publish_to_the_one_topic_and_use_its_key(self, cluster):
        (topic,) = cluster.resources("AWS::SNS::Topic")
        (key,) = [name for name in cluster.resources("AWS::KMS::Key") if name.startswith("Topic")]
        (publish,) = [one for one in statements(cluster) if one["Action"] == "sns:Publish"]
        assert publish["Resource"] == {"Ref": topic}
        (use,) = [one for one in statements(cluster) if one["Resource"] == {"Fn::GetAtt": [key, "Arn"]}]
        assert use["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
        assert document(cluster)["monitoring"]["topic"] == "REFERENCE"
        assert "sns" in endpoints(cluster)

    def test_the_topic_is_encrypted_tells_a_person_and_takes_alarms(self, cluster):
        assert "KmsMasterKeyId" in cluster.only("AWS::SNS::Topic")["Properties"]
        subscription = cluster.only("AWS::SNS::Subscription")["Properties"]
        assert (subscription["Protocol"], subscription["Endpoint"]) == ("email", "someone@example.com")
        (refused,) = cluster.only("AWS::SNS::TopicPolicy")["Properties"]["PolicyDocument"]["Statement"]
        assert (refused["Effect"], refused["Condition"]) == ("Deny", {"Bool": {"aws:SecureTransport": "false"}})
        policies = [key["Properties"]["KeyPolicy"] for key in cluster.resources("AWS::KMS::Key").values()]
        allowed = [one for policy in policies for one in policy["Statement"] if one.get("Sid") == "LetAlarmsPublish"]
        assert allowed[0]["Principal"] == {"Service": "cloudwatch.amazonaws.com"}

    def test_linters_find_nothing_that_is_not_meant(self, cluster):
        findings = lint(json.dumps(cluster.template), config=ManualArgs(regions=["us-east-1"]))
        assert [f"{finding.rule.id} {finding.message}" for finding in findings] == []
        app = cluster.stack.node.root
        cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
        cdk.Validations.of(cluster.cluster).acknowledge(
            cdk.Acknowledgment(
                id="AwsSolutions-IAM5[Resource::<Checkpoints620E2F20.Arn>/test-run/*]",
                reason="IAM names objects by pattern: this is the folder of the one run.",
            )
        )
        app.synth()  # raises on any finding

    def test_a_topic_of_ones_own_needs_no_key_of_ours(self, tmp_path):
        arn = "arn:aws:sns:us-east-1:123456789012:team"
        cluster = with_topic(tmp_path, make=lambda stack: sns.Topic.from_topic_arn(stack, "Topic", arn))
        (publish,) = [one for one in statements(cluster) if one["Action"] == "sns:Publish"]
        assert publish["Resource"] == arn
        assert document(cluster)["monitoring"]["topic"] == arn

    @pytest.mark.parametrize("address", ["nobody", "a@b", "a b@example.com", ""])
    def test_what_is_no_address_is_refused(self, stack, address):
        with pytest.raises(ValueError, match="notify is "):
            NotificationTopic(stack, "Topic", email=address)


def with_topic(outdir, *, make=lambda stack: NotificationTopic(stack, "Topic", email="someone@example.com"), **arguments):
    """A cluster with a topic, which is made in the cluster's stack."""
    return Synthesized(outdir, notify=make, **arguments)


@pytest.mark.parametrize("instance_type", ["g6.xlarge", "c7i.2xlarge"])
@pytest.mark.parametrize("minutes", [None, 120])
def test_nodes_that_nobody_would_end_are_warned_of(synthesize, instance_type, minutes):
    job = TrainingJob(run="r", configuration=dict(JOB.configuration), shutdown=ShutdownSpec(keep_minutes=minutes))
    warnings = synthesize(job=job, instance_type=instance_type).annotations["warning"]
    warned = [one for one in warnings if "keep_minutes is null" in one]
    assert bool(warned) == (minutes is None and instance_type == "g6.xlarge")
