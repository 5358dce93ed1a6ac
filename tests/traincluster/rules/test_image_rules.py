"""The rules of images and identities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from traincluster.image import NodeImage, default_image
from traincluster.instances import instance_type, instance_type_names
from traincluster.rules import check
from traincluster.rules.identity import IdentityFacts, partition_of
from traincluster.rules.image import ROOT_DEVICES

AMI = "ami-0123456789abcdef0"
OPERATING_SYSTEMS = st.sampled_from(list(ROOT_DEVICES))


def found(image: NodeImage, name: str, *levels: str, pinned: bool = True, efa: bool = False, gib: int = 120) -> set[str]:
    facts = image.facts(instance_type(name), pinned=pinned, efa=efa, root_volume_gib=gib)
    return {finding.rule for finding in check(facts) if finding.level in (levels or ("error", "warning"))}


@given(st.sampled_from(instance_type_names()), OPERATING_SYSTEMS)
def test_the_image_that_is_found_for_a_type_suits_it(name, os):
    """Whatever the type and the operating system: an image without an error, or one sentence; V100 has none."""
    own = instance_type(name)
    try:
        image = default_image(own, os=os)
    except ValueError as error:
        assert str(error).startswith(f"os is {os!r}") and str(error).endswith(".")
        return
    errors = found(image, name, "error")
    assert errors == ({"open-driver-needs-turing"} if own.accelerator and own.accelerator.name == "V100" else set())


@pytest.mark.parametrize(
    ("name", "rule"),
    [("p3dn.24xlarge", {"open-driver-needs-turing"}), ("g4dn.xlarge", set()), ("p4d.24xlarge", set()), ("trn1.32xlarge", set())],
)
def test_boot_04_driver_and_accelerator(name, rule):
    assert found(default_image(instance_type(name)), name, "error") == rule
    assert found(NodeImage(ami=AMI), name) == set()  # an image of one's own is not judged by its driver


def test_boot_04_an_image_for_another_accelerator_is_refused():
    neuron = default_image(instance_type("trn1.32xlarge"))
    nvidia = default_image(instance_type("p5.48xlarge"))
    assert found(neuron, "p5.48xlarge", "error") == {"image-drives-accelerator"}
    assert found(nvidia, "trn1.32xlarge", "error") == {"image-drives-accelerator"}
    assert found(nvidia, "c7i.2xlarge", "error") == set()


def test_syn_03_only_what_is_not_pinned_is_warned_of():
    image = default_image(instance_type("p5.48xlarge"))
    assert found(image, "p5.48xlarge", pinned=False) == {"image-is-pinned"}
    assert found(image, "p5.48xlarge") == set()


@pytest.mark.parametrize(("name", "arch", "fine"), [("c7g.2xlarge", "arm64", True), ("c7g.2xlarge", "x86_64", False)])
def test_the_architecture_is_stated_or_read_from_the_name(name, arch, fine):
    expected = set() if fine else {"image-has-architecture"}
    assert found(NodeImage(ami=AMI, arch=arch), name) == expected
    named = f"/aws/service/deeplearning/ami/{arch}/base-oss-nvidia-driver-gpu-ubuntu-24.04/latest/ami-id"
    assert found(NodeImage(ami=named), name) == expected
    assert found(NodeImage(ami=AMI), name) == set()


@given(OPERATING_SYSTEMS)
def test_the_usual_root_device_is_silent_and_another_is_asked_about(os):
    usual = ROOT_DEVICES[os]
    assert "image-root-device" not in found(NodeImage(ami=AMI, os=os, root_device=usual), "c7i.large")
    assert "image-root-device" in found(NodeImage(ami=AMI, os=os, root_device="/dev/xyz"), "c7i.large")


@pytest.mark.parametrize(("own", "gib", "fine"), [(False, 99, False), (False, 100, True), (True, 7, False), (True, 8, True)])
def test_sto_10_the_root_volume(own, gib, fine):
    image = NodeImage(ami=AMI) if own else default_image(instance_type("c7i.large"))
    assert found(image, "c7i.large", "error", gib=gib) == (set() if fine else {"root-volume-holds-image"})


def test_red_hat_has_no_image_of_aws_and_needs_much():
    assert found(NodeImage(ami=AMI, os="rhel-9"), "p5.48xlarge", efa=True) == {"rhel-image-is-complete"}
    assert found(NodeImage(ami=AMI, os="rhel-8"), "p5.48xlarge", efa=True) == {
        "rhel-image-is-complete",
        "rhel-8-builds-nccl-plugin",
    }
    assert "image-os-supports-type" in found(NodeImage(ami=AMI, os="rhel-9"), "p6e-gb200.36xlarge", "error")


def test_the_neuron_image_says_that_it_is_the_last():
    image = default_image(instance_type("trn2.48xlarge"))
    assert found(image, "trn2.48xlarge", "info") == {"neuron-image-is-the-last"}
    assert found(image, "trn2.48xlarge") == set()


def test_an_image_that_gets_no_patches_is_warned_of():
    assert found(default_image(instance_type("g5.xlarge"), os="ubuntu-22.04"), "g5.xlarge") == {"image-is-patched"}


@pytest.mark.parametrize(
    ("region", "partition"), [("eu-west-1", "aws"), ("cn-north-1", "aws-cn"), ("us-gov-west-1", "aws-us-gov")]
)
def test_arns_are_of_the_partition_and_region(region, partition):
    assert partition_of(region) == partition
    group = f"arn:{partition}:resource-groups:{region}:123456789012:group/g"
    boundary = f"arn:{partition}:iam::123456789012:policy/boundary"
    assert faults(region, group, boundary) == set()
    assert faults(region, group.replace(region, "ap-south-1")) == {"arn-is-of-region"}
    assert faults(region, boundary.replace(partition, "aws-other")) == {"arn-is-of-partition"}
    assert faults(None, group, boundary) == set()


def faults(region: str | None, *arns: str) -> set[str]:
    facts = IdentityFacts(region=region, arns=tuple(("capacity", arn) for arn in arns), volume_key_is_foreign=False)
    return {finding.rule for finding in check(facts)}
