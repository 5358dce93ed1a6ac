"""Which image a node gets, and on what root volume."""

from __future__ import annotations

import pytest

from traincluster import NodeImage
from traincluster.image import default_image
from traincluster.instances import instance_type

AMI = "ami-0123456789abcdef0"


def test_syn_03_a_literal_image_is_pinned(synthesize):
    cluster = synthesize(image=NodeImage(ami=AMI))
    assert cluster.launch_data["ImageId"] == AMI
    parameters = cluster.template.get("Parameters", {}).values()
    assert not any("AWS::EC2::Image::Id" in parameter["Type"] for parameter in parameters)
    assert cluster.annotations["warning"] == []


def test_syn_03_the_newest_image_is_warned_of(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    parameter = cluster.template["Parameters"][cluster.launch_data["ImageId"]["Ref"]]
    assert parameter["Type"] == "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
    (warning,) = cluster.annotations["warning"]
    assert "a deploy after a new release replaces the nodes" in warning
    assert parameter["Default"] in warning


@pytest.mark.parametrize(
    ("name", "part", "python"),
    [
        ("p5.48xlarge", "/x86_64/oss-nvidia-driver-gpu-pytorch-", "/opt/pytorch/bin/python"),
        ("c7i.2xlarge", "/x86_64/oss-nvidia-driver-gpu-pytorch-", "/opt/pytorch/bin/python"),
        ("c7g.2xlarge", "/arm64/oss-nvidia-driver-gpu-pytorch-", "/opt/pytorch/bin/python"),
        ("g5g.xlarge", "/arm64/oss-nvidia-driver-gpu-pytorch-", "/opt/pytorch/bin/python"),
        ("trn1.32xlarge", "/neuron/dlami/pytorch-2.9/", "/opt/aws_neuronx_venv_pytorch_2_9/bin/python"),
    ],
)
def test_boot_04_image_suits_the_accelerator(name, part, python):
    image = default_image(instance_type(name))
    assert part in image.ami
    assert image.python == python


def test_boot_04_p3_has_no_image_by_default(synthesize):
    with pytest.raises(ValueError, match=r"p3dn.24xlarge has V100 GPUs, which the open NVIDIA driver.*proprietary"):
        synthesize(instance_type="p3dn.24xlarge")
    assert synthesize(instance_type="p3dn.24xlarge", image=NodeImage(ami=AMI)).launch_data["ImageId"] == AMI


def test_a_type_that_the_image_does_not_list_is_warned_of(cluster_of):
    assert any("AWS does not list p6-b300.48xlarge" in text for text in cluster_of("p6-b300.48xlarge").annotations["warning"])
    assert not any("does not list" in text for text in cluster_of("p5.48xlarge").annotations["warning"])


def test_image_says_which_python_and_which_root_device(synthesize):
    image = NodeImage(ami=AMI, python="/usr/bin/python3.12", root_device="/dev/xvda")
    cluster = synthesize(image=image)
    assert cluster.cluster.run_spec.job.python == "/usr/bin/python3.12"
    assert cluster.launch_data["BlockDeviceMappings"][0]["DeviceName"] == "/dev/xvda"
    assert "image_python=/usr/bin/python3.12\n" in cluster.user_data


@pytest.mark.parametrize("ami", ["ami-xyz", "ubuntu", "", "aws/service", "/with space"])
def test_what_is_no_image_is_refused(ami):
    with pytest.raises(ValueError, match="Give the id of an image"):
        NodeImage(ami=ami)


@pytest.mark.parametrize(("name", "gib"), [("c7i.2xlarge", 120), ("p5.48xlarge", 120), ("trn1.32xlarge", 512)])
def test_sto_10_root_volume_by_default(name, gib, cluster_of):
    (mapping,) = cluster_of(name).launch_data["BlockDeviceMappings"]
    assert mapping == {
        "DeviceName": "/dev/sda1",
        "Ebs": {"VolumeSize": gib, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
    }


@pytest.mark.parametrize("gib", [8, 30, 99])
def test_sto_10_a_root_volume_below_the_images_needs_is_refused(gib, synthesize):
    with pytest.raises(ValueError, match=f"root_volume_gib is {gib}. Allowed: 100 or more"):
        synthesize(root_volume_gib=gib)


def test_sto_10_an_image_of_ones_own_may_be_smaller(synthesize):
    cluster = synthesize(root_volume_gib=30, image=NodeImage(ami=AMI))
    assert cluster.launch_data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 30
