"""Which image a node gets, and on what root volume."""

from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk.assertions import Template

from traincluster import CheckpointBucket, NodeImage, TrainingCluster, TrainingJob, TrainingNetwork
from traincluster.image import PINS_CONTEXT, default_image, pins_of
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
    with pytest.raises(RuntimeError, match=r"p3dn.24xlarge has V100 GPUs, which the open NVIDIA driver.*proprietary"):
        assert synthesize(instance_type="p3dn.24xlarge").template
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
    with pytest.raises(RuntimeError, match=f"root_volume_gib is {gib}. Allowed: 100 or more"):
        assert synthesize(root_volume_gib=gib).template


def test_sto_10_an_image_of_ones_own_may_be_smaller(synthesize):
    cluster = synthesize(root_volume_gib=30, image=NodeImage(ami=AMI))
    assert cluster.launch_data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 30


@pytest.mark.parametrize("os", ["ubuntu-22.04", "ubuntu-24.04", "amazon-linux-2023"])
@pytest.mark.parametrize("name", ["g6e.48xlarge", "g5g.xlarge"])
def test_every_operating_system_has_an_image_with_torch(name, os):
    image = NodeImage.for_type(name, os=os)
    assert f"/{instance_type(name).arch}/oss-nvidia-driver-gpu-pytorch-2." in image.ami
    assert image.ami.endswith(f"-{os}/latest/ami-id")
    assert image.root_device_name == ("/dev/xvda" if os == "amazon-linux-2023" else "/dev/sda1")


@pytest.mark.parametrize(
    ("name", "os", "says"),
    [
        ("p5.48xlarge", "rhel-9", "of which AWS publishes no deep-learning image"),
        ("trn1.32xlarge", "amazon-linux-2023", "is of Ubuntu 24.04 only"),
    ],
)
def test_an_operating_system_without_an_image_is_refused(name, os, says):
    with pytest.raises(ValueError, match=says):
        NodeImage.for_type(name, os=os)


def test_an_unknown_operating_system_is_refused():
    with pytest.raises(ValueError, match=r"os is 'windows'\. Allowed: 'ubuntu-22\.04'"):
        NodeImage(ami=AMI, os="windows")


def test_a_red_hat_image_is_ones_own_and_said_to_need_much(synthesize):
    cluster = synthesize(instance_type="p5.48xlarge", image=NodeImage(ami=AMI, os="rhel-8", python="/opt/torch/bin/python"))
    assert cluster.launch_data["BlockDeviceMappings"][0]["DeviceName"] == "/dev/sda1"
    warnings = "\n".join(cluster.annotations["warning"])
    assert "NVIDIA's driver" in warnings and "kmod-lustre-client" in warnings
    assert "Build the plugin from source" in warnings


def pinned(pins: dict, region: str | None, tmp_path) -> tuple[dict, list[str]]:
    """Template and warnings of a cluster in an app with such pins."""
    app = cdk.App(context={PINS_CONTEXT: pins}, outdir=str(tmp_path))
    stack = cdk.Stack(app, "Stack", env=cdk.Environment(region=region))
    network = TrainingNetwork(stack, "Network")
    job = TrainingJob(run="r", configuration={"steps": 1})
    TrainingCluster(
        stack, "Cluster", network=network, instance_type="c7i.2xlarge", nodes=1, job=job, checkpoints=CheckpointBucket(stack, "B")
    )
    warnings = [
        str(entry.data)
        for one in stack.node.find_all()
        for entry in one.node.metadata
        if entry.type == "aws:cdk:warning" and "image" in str(entry.data)
    ]
    return Template.from_stack(stack).to_json(), warnings


def image_of(template: dict) -> object:
    (launch,) = [one for one in template["Resources"].values() if one["Type"] == "AWS::EC2::LaunchTemplate"]
    return launch["Properties"]["LaunchTemplateData"]["ImageId"]


PARAMETER = default_image(instance_type("c7i.2xlarge")).ami


def test_syn_08_a_pin_in_the_context_stays_until_it_is_moved(tmp_path):
    template, warnings = pinned({"us-east-1": {PARAMETER: AMI}}, "us-east-1", tmp_path)
    assert image_of(template) == AMI
    assert warnings == []
    assert not any("AWS::EC2::Image::Id" in one["Type"] for one in template.get("Parameters", {}).values())


def test_syn_08_a_stack_of_any_region_takes_the_pin_of_the_region_it_is_deployed_to(tmp_path):
    template, warnings = pinned({"us-east-1": {PARAMETER: AMI}, "us-west-2": {PARAMETER: AMI[:-1] + "1"}}, None, tmp_path)
    found = image_of(template)["Fn::FindInMap"]
    assert found[1:] == [{"Ref": "AWS::Region"}, "ami"]
    assert template["Mappings"][found[0]] == {"us-east-1": {"ami": AMI}, "us-west-2": {"ami": AMI[:-1] + "1"}}
    assert warnings == []


def test_a_pin_of_another_region_or_parameter_is_not_used(tmp_path):
    template, warnings = pinned({"us-west-2": {PARAMETER: AMI}, "us-east-1": {"/other": AMI}}, "us-east-1", tmp_path)
    assert template["Parameters"][image_of(template)["Ref"]]["Default"] == PARAMETER
    assert "traincluster pin-image" in warnings[0]


@pytest.mark.parametrize("context", ["x", {"us-east-1": AMI}, {"us-east-1": {PARAMETER: "latest"}}])
def test_pins_that_are_none_are_refused(context):
    with pytest.raises(ValueError, match="write it by `traincluster pin-image`"):
        pins_of(context, PARAMETER)
