"""The EBS volumes of a node."""

from __future__ import annotations

import pytest
from aws_cdk import aws_kms as kms

from traincluster import DataVolume


def mappings(cluster) -> dict[str, dict]:
    return {one["DeviceName"]: one["Ebs"] for one in cluster.launch_data["BlockDeviceMappings"]}


def test_the_root_volume_alone_by_default(cluster_of):
    assert mappings(cluster_of("c7i.2xlarge")) == {
        "/dev/sda1": {"DeleteOnTermination": True, "Encrypted": True, "VolumeSize": 120, "VolumeType": "gp3"}
    }


def test_sto_10_the_root_volume_holds_the_image(cluster_of, synthesize):
    assert mappings(cluster_of("c7i.2xlarge"))["/dev/sda1"]["VolumeSize"] >= 100
    assert mappings(cluster_of("trn1.32xlarge"))["/dev/sda1"]["VolumeSize"] >= 512
    for size in (8, 30):
        with pytest.raises((ValueError, RuntimeError), match=f"root_volume_gib is {size}"):
            synthesize(root_volume_gib=size).stack.node.root.synth()


def test_data_volumes_are_encrypted_tagged_and_go_with_the_instance(synthesize):
    cluster = synthesize(
        volumes=[
            DataVolume(size_gib=2000, path="/data", iops=6000, throughput_mib_s=500),
            DataVolume.checkpoints(size_gib=500, keep=True),
        ]
    )
    found = mappings(cluster)
    assert list(found) == ["/dev/sda1", "/dev/sdf", "/dev/sdg"]
    assert found["/dev/sdf"] == {
        "DeleteOnTermination": True,
        "Encrypted": True,
        "Iops": 6000,
        "Throughput": 500,
        "VolumeSize": 2000,
        "VolumeType": "gp3",
    }
    assert found["/dev/sdg"] == {
        "DeleteOnTermination": False,
        "Encrypted": True,
        "Iops": 32_000,
        "VolumeSize": 500,
        "VolumeType": "io2",
    }
    assert "volume" in [one["ResourceType"] for one in cluster.launch_data["TagSpecifications"]]
    assert [(one.device, one.path) for one in cluster.cluster.run_spec.storage.volumes] == [
        ("/dev/sdf", "/data"),
        ("/dev/sdg", "/checkpoints"),
    ]


def test_keys_of_ones_own_encrypt(stack, synthesize):
    key = kms.Key.from_key_arn(stack, "Key", "arn:aws:kms:us-east-1:123456789012:key/01234567-89ab-cdef-0123-456789abcdef")
    cluster = synthesize(volumes=[DataVolume(size_gib=10, path="/data", encryption_key=key)], volume_key=key)
    assert {one["KmsKeyId"] for one in mappings(cluster).values()} == {key.key_arn}


def test_instance_store_is_told_to_the_node(synthesize):
    assert (
        synthesize(instance_type="p4d.24xlarge", instance_store="/scratch").cluster.run_spec.storage.instance_store == "/scratch"
    )


def test_all_faults_of_storage_are_told_together(synthesize):
    cluster = synthesize(
        instance_store="/data", volumes=[DataVolume(size_gib=0, path="/data"), DataVolume(size_gib=10, path="/v", type="io2")]
    )
    with pytest.raises(RuntimeError) as raised:
        cluster.stack.node.root.synth()
    for rule in ("volume-size", "volume-iops", "mount-paths", "instance-store-exists"):
        assert f"[{rule}]" in str(raised.value)
