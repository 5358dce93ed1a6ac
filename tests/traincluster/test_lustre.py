"""FSx for Lustre: what is made, in which order, and who may reach it."""

from __future__ import annotations

import json

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Annotations, Match, Template

from traincluster import CheckpointBucket, DatasetBucket, LustreFileSystem, TrainingCluster, TrainingJob, TrainingNetwork
from traincluster.lustre import DataRepository

JOB = TrainingJob(run="test-run", configuration={"steps": 10})
RULE_TYPES = ("AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress")


def file_system_in(stack: cdk.Stack, **arguments) -> LustreFileSystem:
    network = TrainingNetwork(stack, "Network")
    return LustreFileSystem(stack, "Fsx", network=network, **{"capacity_gib": 4800, **arguments})


def resources(stack: cdk.Stack, *kinds: str) -> dict[str, dict]:
    template = Template.from_stack(stack).to_json()["Resources"]
    return {name: one for name, one in template.items() if one["Type"] in kinds}


def only(stack: cdk.Stack, kind: str) -> dict:
    (resource,) = resources(stack, kind).values()
    return resource


def made(stack: cdk.Stack) -> dict:
    return only(stack, "AWS::FSx::FileSystem")


def with_cluster(stack: cdk.Stack, **arguments) -> TrainingCluster:
    network = TrainingNetwork(stack, "Network")
    file_system = LustreFileSystem(stack, "Fsx", network=network, **{"capacity_gib": 4800, **arguments})
    instance_type = "p5.48xlarge" if arguments.get("efa") else "c7i.2xlarge"
    return TrainingCluster(
        stack,
        "Cluster",
        network=network,
        instance_type=instance_type,
        nodes=2,
        job=JOB,
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        file_systems=[file_system],
    )


def test_the_least_that_is_needed_is_stated(stack):
    file_system_in(stack)
    properties = made(stack)["Properties"]
    assert properties["FileSystemTypeVersion"] == "2.15"
    assert properties["StorageCapacity"] == 4800 and len(properties["SubnetIds"]) == 1
    assert properties["LustreConfiguration"] == {
        "DataCompressionType": "LZ4",
        "DeploymentType": "PERSISTENT_2",
        "MetadataConfiguration": {"Mode": "AUTOMATIC"},
        "PerUnitStorageThroughput": 125,
    }


@pytest.mark.parametrize(
    ("deployment", "storage", "throughput"),
    [("PERSISTENT_2", "SSD", 125), ("PERSISTENT_1", "SSD", 50), ("PERSISTENT_1", "HDD", 12)],
)
def test_sto_01_the_default_throughput_is_in_the_template(deployment, storage, throughput, stack):
    file_system_in(stack, deployment=deployment, storage=storage, capacity_gib=12_000)
    configuration = made(stack)["Properties"]["LustreConfiguration"]
    assert configuration["PerUnitStorageThroughput"] == throughput
    assert configuration.get("DriveCacheType") == ("NONE" if storage == "HDD" else None)


def test_scratch_has_neither_throughput_nor_metadata(stack):
    file_system_in(stack, deployment="SCRATCH_2", compression=False)
    assert made(stack)["Properties"]["LustreConfiguration"] == {"DataCompressionType": "NONE", "DeploymentType": "SCRATCH_2"}


@pytest.mark.parametrize(
    ("gib", "cache"),
    [
        (None, {"SizingMode": "PROPORTIONAL_TO_THROUGHPUT_CAPACITY"}),
        (0, {"SizingMode": "NO_CACHE"}),
        (4000, {"SizingMode": "USER_PROVISIONED", "SizeGiB": 4000}),
    ],
)
def test_intelligent_tiering(gib, cache, stack):
    file_system_in(stack, storage="INTELLIGENT_TIERING", capacity_gib=None, throughput=4000, read_cache_gib=gib)
    properties = made(stack)["Properties"]
    assert "StorageCapacity" not in properties
    assert properties["StorageType"] == "INTELLIGENT_TIERING"
    assert properties["LustreConfiguration"]["ThroughputCapacity"] == 4000
    assert properties["LustreConfiguration"]["DataReadCacheConfiguration"] == cache


def test_sto_03_a_capacity_off_the_grid_stops_the_synth_with_the_nearest(stack):
    file_system_in(stack, capacity_gib=5000)
    with pytest.raises(RuntimeError, match=r"capacity_gib of Stack/Fsx is 5000.*Set it to 4800 or 7200"):
        stack.node.root.synth()


def test_syn_05_the_file_system_waits_for_every_rule_of_its_group(stack):
    with_cluster(stack)
    file_system = made(stack)
    (own,) = file_system["Properties"]["SecurityGroupIds"]
    rules = resources(stack, *RULE_TYPES)
    of_its_group = {key for key, rule in rules.items() if rule["Properties"]["GroupId"] == own}
    assert len(of_its_group) == 8  # itself and the nodes, in and out, two ranges of ports
    assert of_its_group <= set(file_system["DependsOn"])
    for key in of_its_group:
        properties = rules[key]["Properties"]
        assert (properties["FromPort"], properties["ToPort"]) in ((988, 988), (1018, 1023))
        assert properties["IpProtocol"] == "tcp"


def test_nodes_wait_for_the_file_system_and_for_their_own_rules(stack):
    with_cluster(stack, linked_bucket=DatasetBucket(stack, "Corpus"))
    group = only(stack, "AWS::AutoScaling::AutoScalingGroup")
    waits = set(group["DependsOn"])
    assert set(resources(stack, "AWS::FSx::FileSystem", "AWS::FSx::DataRepositoryAssociation")) <= waits
    nodes = only(stack, "AWS::EC2::LaunchTemplate")["Properties"]["LaunchTemplateData"]["NetworkInterfaces"][0]["Groups"][0]
    rules = {key for key, rule in resources(stack, *RULE_TYPES).items() if rule["Properties"]["GroupId"] == nodes}
    assert len(rules) >= 4 and rules <= waits


def test_efa_lets_all_traffic_pass_between_the_groups_by_id(stack):
    with_cluster(stack, efa=True, capacity_gib=38_400)
    file_system = made(stack)
    assert file_system["Properties"]["LustreConfiguration"]["EfaEnabled"] is True
    assert file_system["Properties"]["LustreConfiguration"]["MetadataConfiguration"] == {"Mode": "AUTOMATIC"}
    (own,) = file_system["Properties"]["SecurityGroupIds"]
    rules = [rule["Properties"] for rule in resources(stack, *RULE_TYPES).values() if rule["Properties"]["GroupId"] == own]
    assert len(rules) == 4
    assert all(rule["IpProtocol"] == "-1" and not {"CidrIp", "FromPort"} & rule.keys() for rule in rules)


def test_sto_06_replacement_never_takes_the_files_of_a_persistent_one(stack):
    file_system_in(stack)
    assert (made(stack)["DeletionPolicy"], made(stack)["UpdateReplacePolicy"]) == ("Delete", "Retain")


def test_sto_06_scratch_is_deleted_and_says_so(stack):
    file_system_in(stack, deployment="SCRATCH_2")
    assert (made(stack)["DeletionPolicy"], made(stack)["UpdateReplacePolicy"]) == ("Delete", "Delete")


def test_what_stays_keeps_what_it_needs(stack):
    file_system_in(stack, removal_policy=cdk.RemovalPolicy.RETAIN, linked_bucket=DatasetBucket(stack, "Corpus"))
    kinds = ("AWS::FSx::FileSystem", "AWS::FSx::DataRepositoryAssociation", "AWS::EC2::SecurityGroup", *RULE_TYPES)
    stays = resources(stack, *kinds)
    assert len(stays) == 7
    assert {one["DeletionPolicy"] for one in stays.values()} == {"Retain"}
    Annotations.from_stack(stack).has_warning("/Stack/Fsx", Match.string_like_regexp("so that the destroy fails"))


def test_losing_files_is_warned_of_unless_they_are_exported(stack):
    file_system_in(stack)
    Annotations.from_stack(stack).has_warning("/Stack/Fsx", Match.string_like_regexp("are on no S3 bucket"))


def test_links_with_buckets_go_both_ways_one_after_the_other(stack):
    web, notes = DatasetBucket(stack, "Web", encryption_key=kms.Key(stack, "Key")), DatasetBucket(stack, "Notes")
    file_system_in(
        stack,
        repositories=[
            DataRepository(bucket=web, prefix="corpus/web/", path="/web", exports=False),
            DataRepository(bucket=notes, path="/notes", imports=False),
        ],
    )
    (first_name, first), (_, second) = resources(stack, "AWS::FSx::DataRepositoryAssociation").items()
    events = {"Events": ["NEW", "CHANGED", "DELETED"]}
    assert first["Properties"]["S3"] == {"AutoImportPolicy": events}
    assert first["Properties"]["DataRepositoryPath"]["Fn::Join"][1][2] == "/corpus/web"
    assert second["Properties"]["S3"] == {"AutoExportPolicy": events}
    assert second["Properties"]["BatchImportMetaDataOnCreate"] is False
    assert second["DependsOn"] == [first_name]
    policy = json.dumps(only(stack, "AWS::KMS::Key")["Properties"]["KeyPolicy"])
    assert "AWSServiceRoleForFSxS3Access_*" in policy


def test_a_linked_bucket_is_the_whole_file_system(stack):
    file_system = file_system_in(stack, linked_bucket=DatasetBucket(stack, "Corpus"))
    file_system.add_export_command()
    properties = only(stack, "AWS::FSx::DataRepositoryAssociation")["Properties"]
    assert properties["FileSystemPath"] == "/"
    assert set(properties["S3"]) == {"AutoImportPolicy", "AutoExportPolicy"}
    Annotations.from_stack(stack).has_no_warning("*", Match.string_like_regexp("on no S3 bucket"))
    (output,) = Template.from_stack(stack).find_outputs("*", {"Value": Match.any_value()}).values()
    assert "EXPORT_TO_REPOSITORY" in json.dumps(output["Value"])


def test_an_export_needs_a_bucket(stack):
    with pytest.raises(ValueError, match="is linked with no bucket"):
        file_system_in(stack).add_export_command()


def test_a_key_of_ones_own_encrypts(stack):
    file_system_in(stack, encryption_key=kms.Key(stack, "Key"))
    assert "KmsKeyId" in made(stack)["Properties"]


def test_nodes_are_told_what_to_mount(stack):
    cluster = with_cluster(stack)
    (mount,) = cluster.run_spec.storage.mounts
    assert (mount.type, mount.path, mount.efa) == ("lustre", "/fsx", False)
    name = stack.resolve(mount.source)["Fn::Join"][1]
    assert name[0]["Fn::GetAtt"][1] == "DNSName" and name[1] == "@tcp:/" and name[2]["Fn::GetAtt"][1] == "LustreMountName"


def test_an_existing_file_system_is_adopted(stack):
    network = TrainingNetwork(stack, "Network")
    group = ec2.SecurityGroup.from_security_group_id(stack, "Group", "sg-0123456789abcdef0")
    adopted = LustreFileSystem.adopt(
        stack, "Fsx", file_system_id="fs-0123456789abcdef0", mount_name="2p3fhbmv", security_group=group, path="/data"
    )
    TrainingCluster(
        stack,
        "Cluster",
        network=network,
        instance_type="c7i.2xlarge",
        nodes=1,
        job=JOB,
        checkpoints=CheckpointBucket(stack, "Checkpoints"),
        file_systems=[adopted],
    )
    assert not resources(stack, "AWS::FSx::FileSystem")
    assert adopted.mount.source.startswith("fs-0123456789abcdef0.fsx.") and adopted.mount.source.endswith("@tcp:/2p3fhbmv")
    rules = [rule["Properties"] for rule in resources(stack, *RULE_TYPES).values()]
    assert len([rule for rule in rules if rule["GroupId"] == "sg-0123456789abcdef0"]) == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"file_system_id": "fsx-1"}, "file_system_id is 'fsx-1'"),
        ({"mount_name": "/fsx"}, "mount_name is '/fsx'"),
    ],
)
def test_only_an_existing_name_is_adopted(given, message, stack):
    group = ec2.SecurityGroup.from_security_group_id(stack, "Group", "sg-0123456789abcdef0")
    arguments = {"file_system_id": "fs-0123456789abcdef0", "mount_name": "fsx", **given}
    with pytest.raises(ValueError, match=message):
        LustreFileSystem.adopt(stack, "Fsx", security_group=group, **arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deployment": "PERSISTENT_3"}, "deployment is 'PERSISTENT_3'. Allowed: 'SCRATCH_2'"),
        ({"storage": "NVME"}, "storage is 'NVME'"),
        ({"removal_policy": cdk.RemovalPolicy.SNAPSHOT}, "FSx for Lustre takes DESTROY or RETAIN"),
    ],
)
def test_unknown_choices_are_refused(given, message, stack):
    with pytest.raises(ValueError, match=message):
        file_system_in(stack, **given)


def test_a_repository_that_does_nothing_is_refused(stack):
    bucket = DatasetBucket(stack, "Corpus")
    with pytest.raises(ValueError, match="neither imports nor exports"):
        DataRepository(bucket=bucket, imports=False, exports=False)
    with pytest.raises(ValueError, match="Give a folder of the file system"):
        DataRepository(bucket=bucket, path="web")


def test_a_file_system_of_another_stack_does_not_depend_on_the_clusters(tmp_path):
    app = cdk.App(outdir=str(tmp_path))
    data, run = cdk.Stack(app, "Data"), cdk.Stack(app, "Run")
    network = TrainingNetwork(data, "Network")
    file_system = LustreFileSystem(data, "Fsx", network=network, capacity_gib=4800, linked_bucket=DatasetBucket(data, "Corpus"))
    TrainingCluster(
        run,
        "Cluster",
        network=network,
        instance_type="c7i.2xlarge",
        nodes=1,
        job=JOB,
        checkpoints=CheckpointBucket(data, "Checkpoints"),
        file_systems=[file_system],
    )
    app.synth()
    assert run.dependencies == [data] and data.dependencies == []
    assert len(resources(run, *RULE_TYPES)) >= 8
