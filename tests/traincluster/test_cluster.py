"""The cluster as a whole: what a node is allowed, what goes in which order, what stays the same."""

from __future__ import annotations

import copy
import json

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_s3 as s3

from traincluster import TrainingJob


def test_tear_01_the_placement_group_has_no_name_and_goes_last(cluster_of):
    cluster = cluster_of("p4d.24xlarge")
    (group,) = cluster.resources("AWS::EC2::PlacementGroup")
    assert cluster.resources("AWS::EC2::PlacementGroup")[group]["Properties"] == {"Strategy": "cluster"}
    assert cluster.launch_data["Placement"] == {"GroupName": {"Ref": group}}
    (template,) = cluster.resources("AWS::EC2::LaunchTemplate")
    launched = cluster.only("AWS::AutoScaling::AutoScalingGroup")["Properties"]["LaunchTemplate"]
    assert launched == {
        "LaunchTemplateId": {"Ref": template},
        "Version": {"Fn::GetAtt": [template, "LatestVersionNumber"]},
    }


def test_tear_06_the_log_group_is_explicit_and_ends_with_the_stack(cluster_of):
    group = cluster_of("c7i.2xlarge").only("AWS::Logs::LogGroup")
    assert group["Properties"] == {"RetentionInDays": 30}
    assert group["DeletionPolicy"] == "Delete"


@pytest.mark.parametrize("name", ["p5.48xlarge", "c7i.2xlarge"])
def test_boot_07_metadata_needs_a_token_and_reaches_containers(name, cluster_of):
    options = cluster_of(name).launch_data["MetadataOptions"]
    assert options == {"HttpTokens": "required", "HttpPutResponseHopLimit": 2}


def test_everything_a_node_is_made_of_is_tagged(cluster_of):
    specifications = cluster_of("p5.48xlarge").launch_data["TagSpecifications"]
    assert [one["ResourceType"] for one in specifications] == ["instance", "volume", "network-interface"]
    for one in specifications:
        tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
        assert tags == {"Name": "Stack/Cluster", "traincluster:cluster": "Stack/Cluster", "traincluster:run": "test-run"}


def test_the_group_can_be_scaled_to_nothing_and_replaces_all_nodes_at_once(synthesize):
    group = synthesize(nodes=3).only("AWS::AutoScaling::AutoScalingGroup")
    properties = group["Properties"]
    assert (properties["MinSize"], properties["DesiredCapacity"], properties["MaxSize"]) == ("0", "3", "3")
    assert group["UpdatePolicy"] == {"AutoScalingRollingUpdate": {"MinInstancesInService": 0, "MaxBatchSize": 3}}


def test_a_large_group_is_replaced_in_the_largest_batches_there_are(synthesize):
    group = synthesize(nodes=128).only("AWS::AutoScaling::AutoScalingGroup")
    assert group["UpdatePolicy"]["AutoScalingRollingUpdate"]["MaxBatchSize"] == 100


def statements(cluster) -> list[dict]:
    (policy,) = cluster.resources("AWS::IAM::Policy").values()
    return policy["Properties"]["PolicyDocument"]["Statement"]


def test_a_node_may_do_these_things_and_no_others(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    allowed = {}
    for statement in statements(cluster):
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not any("*" in action for action in actions)
        for action in actions:
            allowed.setdefault(action, []).append(json.dumps(statement["Resource"]))
    assert set(allowed) == {
        "autoscaling:CompleteLifecycleAction",
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeAutoScalingInstances",
        "autoscaling:RecordLifecycleActionHeartbeat",
        "autoscaling:SetDesiredCapacity",
        "autoscaling:SetInstanceHealth",
        "autoscaling:UpdateAutoScalingGroup",
        "cloudwatch:PutMetricData",
        "ec2:DescribeCapacityReservations",
        "ec2:DescribeInstances",
        "ec2:DescribeTags",
        "logs:CreateLogStream",
        "logs:PutLogEvents",
        "s3:AbortMultipartUpload",
        "s3:DeleteObject",
        "s3:GetObject",
        "s3:ListBucket",
        "s3:PutObject",
    }
    for action in ("s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"):
        assert all("/test-run/*" in resource for resource in allowed[action]), action


def test_a_node_changes_its_own_group_only(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    (statement,) = [one for one in statements(cluster) if one.get("Sid") == "ChangeOwnGroup"]
    ((key, value),) = statement["Condition"]["StringEquals"].items()
    tags = cluster.only("AWS::AutoScaling::AutoScalingGroup")["Properties"]["Tags"]
    assert {"Key": key.removeprefix("aws:ResourceTag/"), "Value": value, "PropagateAtLaunch": False} in tags


def test_a_node_sends_metrics_to_one_namespace_and_only_if_it_is_to(synthesize):
    wanted = synthesize(metrics_namespace="Team/Training")
    (statement,) = [one for one in statements(wanted) if one.get("Sid") == "SendMetrics"]
    assert (statement["Action"], statement["Resource"]) == ("cloudwatch:PutMetricData", "*")
    assert statement["Condition"] == {"StringEquals": {"cloudwatch:namespace": "Team/Training"}}
    assert wanted.cluster.run_spec.monitoring.namespace == "Team/Training"
    without = synthesize(metrics_namespace="", network={"isolated": True})
    assert not [one for one in statements(without) if one.get("Sid") in ("SendMetrics", "ReadTags")]
    services = json.dumps([one["Properties"]["ServiceName"] for one in without.resources("AWS::EC2::VPCEndpoint").values()])
    assert ".logs" in services and ".monitoring" not in services


def test_a_namespace_that_cloudwatch_refuses_is_refused_at_synth(synthesize):
    with pytest.raises(ValueError, match="namespace is 'AWS/EC2'"):
        synthesize(metrics_namespace="AWS/EC2")


def test_a_node_starts_when_its_role_may_do_its_work(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    needed = set(cluster.only("AWS::AutoScaling::AutoScalingGroup")["DependsOn"])
    assert {*cluster.resources("AWS::IAM::Role"), *cluster.resources("AWS::IAM::Policy")} <= needed


def test_grants_and_connections(synthesize):
    cluster = synthesize()
    stack = cluster.stack
    corpus = s3.Bucket(stack, "Corpus")
    cluster.cluster.grant_read(corpus, "web/*").assert_success()
    s3.Bucket(stack, "Other").grant_put(cluster.cluster)
    other = ec2.SecurityGroup(stack, "Elsewhere", vpc=ec2.Vpc(stack, "Vpc", restrict_default_security_group=False))
    cluster.cluster.connections.allow_to(other, ec2.Port.tcp(988))
    text = json.dumps(statements(cluster))
    assert '"/web/*"' in text and "s3:PutObjectTagging" in text
    ports = [one["Properties"].get("FromPort") for one in cluster.resources("AWS::EC2::SecurityGroupIngress").values()]
    assert 988 in ports


@pytest.mark.parametrize(
    ("name", "accelerator", "count", "efa", "processes"),
    [
        ("p5.48xlarge", "nvidia", 8, 32, 8),
        ("trn1.32xlarge", "neuron", 16, 8, 32),
        ("g5.xlarge", "nvidia", 1, 0, 1),
        ("c7i.2xlarge", "none", 0, 0, 1),
    ],
)
def test_the_run_spec_says_what_a_node_must_find(name, accelerator, count, efa, processes, cluster_of):
    spec = cluster_of(name).cluster.run_spec.cluster
    found = (spec.accelerator, spec.accelerators_per_node, spec.efa_interfaces, spec.processes_per_node)
    assert found == (accelerator, count, efa, processes)
    assert (spec.name, spec.nodes_min, spec.nodes_desired, spec.nodes_max) == ("Stack/Cluster", 2, 2, 2)
    assert spec.nodes_usable == ()


@pytest.mark.parametrize(
    ("nodes", "least", "entry_point", "expected"),
    [
        (4, 1, "trainrun.pretrain", (1, 2, 4)),
        (4, 4, "trainrun.pretrain", ()),
        (2, 1, "trainrun.pretrain", ()),
        (4, 1, "/bin/x", ()),
    ],
)
def test_ela_10_nodes_know_how_many_of_them_can_train_together(nodes, least, entry_point, expected, synthesize):
    settings = {"batch_tokens": 4096, "sequence_length": 128}
    job = TrainingJob(run="r", entry_point=entry_point, configuration=settings)
    made = synthesize(instance_type="c7i.2xlarge", nodes=nodes, min_nodes=least, job=job)
    assert made.cluster.run_spec.cluster.nodes_usable == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"nodes": 0}, "nodes is 0. Allowed: 1 or more"),
        ({"min_nodes": 3}, r"min_nodes is 3. Allowed: 1 to nodes \(2\)"),
        ({"min_nodes": 0}, "min_nodes is 0"),
        ({"processes_per_node": 0}, "processes_per_node is 0"),
        ({"instance_type": "c7i.2xlarg"}, "Did you mean c7i.2xlarge"),
        ({"instance_type": "dl1.24xlarge"}, "which trainrun cannot drive"),
    ],
)
def test_what_could_not_run_is_refused(arguments, message, synthesize):
    with pytest.raises(ValueError, match=message):
        synthesize(**arguments)


def test_syn_08_equal_input_gives_equal_bytes(synthesize):
    first, second = (json.dumps(synthesize(instance_type="p5.48xlarge").template, sort_keys=True) for _ in range(2))
    assert first == second


def test_syn_08_an_unrelated_change_leaves_launch_template_and_user_data_alone(synthesize):
    before, after = synthesize(), synthesize()
    cdk.Tags.of(after.bucket).add("owner", "somebody")
    assert after.only("AWS::S3::Bucket") != before.only("AWS::S3::Bucket")
    assert after.resources("AWS::EC2::LaunchTemplate") == before.resources("AWS::EC2::LaunchTemplate")


def test_a_change_of_the_job_is_a_change_of_the_user_data_alone(synthesize):
    before = synthesize()
    after = synthesize(job=TrainingJob(run="test-run", configuration={"steps": 11}))
    templates = [copy.deepcopy(one.template) for one in (before, after)]
    data = [template["Resources"] for template in templates]
    (name,) = before.resources("AWS::EC2::LaunchTemplate")
    user_data = [one[name]["Properties"]["LaunchTemplateData"].pop("UserData") for one in data]
    assert user_data[0] != user_data[1]
    assert templates[0] == templates[1]


def test_bandwidth_is_measured_between_gpus_only(synthesize):
    assert synthesize(instance_type="g5.48xlarge", bandwidth_check=True).cluster.run_spec.cluster.bandwidth_check
    for name in ("c7i.2xlarge", "p5.4xlarge", "trn1.32xlarge"):
        with pytest.raises(ValueError, match=f"bandwidth_check is true, but {name} does not have several GPUs"):
            synthesize(instance_type=name, bandwidth_check=True)
