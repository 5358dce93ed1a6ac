"""A template for every type of the catalogue, with as many EFA interfaces as EC2 allows.

Types whose templates differ in the type's name alone share one: there are some dozens of distinct ones for the 1,400 types, and
cfn-lint and cdk-nag see each of them once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from cdk_nag import AwsSolutionsChecks
from cfnlint.api import ManualArgs, lint

from traincluster import Capacity, CheckpointBucket, NodeImage, TrainingCluster, TrainingJob, TrainingNetwork
from traincluster.efa import network_interfaces, use_efa
from traincluster.image import default_image, root_volume_size
from traincluster.instances import InstanceType, instance_type, instance_type_names

ROOT = Path(__file__).parents[2]
Shape = tuple[Any, ...]
OWN_IMAGE = NodeImage(ami="ami-0123456789abcdef0")
BLOCK = Capacity.block("cr-0123456789abcdef0")
CLUSTERS_PER_STACK = 12
"""CloudFormation takes 500 resources a stack; a cluster is about ten."""


def capacity_of(type_: InstanceType) -> Capacity:
    """The first way in which EC2 sells the type."""
    return Capacity.on_demand() if "on-demand" in type_.purchase else BLOCK


def is_drivable(type_: InstanceType) -> bool:
    return type_.accelerator is None or type_.accelerator.kind != "other"


def image_of(type_: InstanceType) -> NodeImage:
    """AWS's image, or one of the user's own where AWS has none whose driver knows the type's GPUs."""
    is_volta = type_.accelerator is not None and type_.accelerator.name == "V100"
    return OWN_IMAGE if is_volta else default_image(type_)


def shape_of(type_: InstanceType) -> Shape:
    """All that a template says about a type, but for its name and its number of ranks."""
    return (
        network_interfaces(type_, efa=use_efa(type_, None)),
        image_of(type_).ami,
        root_volume_size(type_, None),
        type_.cluster_placement,
        type_.accelerator is not None and type_.accelerator.kind,
        capacity_of(type_).kind,
    )


@pytest.fixture(scope="module")
def shapes() -> dict[Shape, list[InstanceType]]:
    """Every distinct shape with the types that have it."""
    found: dict[Shape, list[InstanceType]] = {}
    for type_ in map(instance_type, instance_type_names()):
        if is_drivable(type_):
            found.setdefault(shape_of(type_), []).append(type_)
    return found


@pytest.fixture(scope="module")
def app(shapes, tmp_path_factory: pytest.TempPathFactory) -> cdk.App:
    """An app with a cluster for each shape, several to a stack; the cluster's id is its type with dashes."""
    context = json.loads((ROOT / "cdk.json").read_text())["context"]
    app = cdk.App(context=context, outdir=str(tmp_path_factory.mktemp("assembly")))
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    cdk.Validations.of(app).acknowledge(
        cdk.Acknowledgment(id="AwsSolutions-IAM5[Resource::<Checkpoints620E2F20.Arn>/run/*]", reason="One folder of a bucket.")
    )
    firsts = [types[0] for types in shapes.values()]
    for start in range(0, len(firsts), CLUSTERS_PER_STACK):
        stack = cdk.Stack(app, f"Stack{start // CLUSTERS_PER_STACK}")
        network, bucket = TrainingNetwork(stack, "Network"), CheckpointBucket(stack, "Checkpoints")
        for type_ in firsts[start : start + CLUSTERS_PER_STACK]:
            TrainingCluster(
                stack,
                type_.name.replace(".", "-"),
                network=network,
                instance_type=type_.name,
                nodes=2,
                capacity=capacity_of(type_),
                image=image_of(type_),
                checkpoints=bucket,
                job=TrainingJob(run="run", configuration={"batch_tokens": 256 * 64 * 720_720}),
            )
    return app


@pytest.fixture(scope="module")
def templates(app) -> dict[str, dict[str, Any]]:
    """The templates of all stacks; making them runs the rules and cdk-nag, which raise on any finding."""
    assembly = app.synth()
    return {stack.stack_name: stack.template for stack in assembly.stacks}


def test_every_type_is_in_a_template_or_refused_in_a_sentence(shapes):
    covered = {type_.name for types in shapes.values() for type_ in types}
    refused = set(instance_type_names()) - covered
    assert len(covered) > 1300
    stack = cdk.Stack()
    network, bucket = TrainingNetwork(stack, "Network"), CheckpointBucket(stack, "Checkpoints")
    for number, name in enumerate(sorted(refused)):
        with pytest.raises(ValueError, match=rf"{name} has .* which trainrun cannot drive. Choose a type with"):
            TrainingCluster(
                stack,
                f"Cluster{number}",
                network=network,
                instance_type=name,
                nodes=1,
                checkpoints=bucket,
                image=OWN_IMAGE,
                job=TrainingJob(run="run", configuration={"batch_tokens": 256 * 64 * 720_720}),
            )


def test_every_template_has_as_many_efa_interfaces_as_ec2_allows(shapes, templates):
    launched = {
        one["Properties"]["LaunchTemplateData"]["InstanceType"]: one["Properties"]["LaunchTemplateData"]["NetworkInterfaces"]
        for template in templates.values()
        for one in template["Resources"].values()
        if one["Type"] == "AWS::EC2::LaunchTemplate"
    }
    assert len(launched) == len(shapes)
    for types in shapes.values():
        interfaces = launched[types[0].name]
        efa = sum(interface["InterfaceType"] in ("efa", "efa-only") for interface in interfaces)
        assert {type_.max_efa_interfaces for type_ in types} == {efa}
        assert all(interface["DeleteOnTermination"] for interface in interfaces)
        slots = {(interface["NetworkCardIndex"], interface["DeviceIndex"]) for interface in interfaces}
        assert len(slots) == len(interfaces)


def test_every_template_passes_cfn_lint(templates):
    # E3628: which types a region offers, by cfn-lint's own snapshot; no region offers all of them.
    wanted = ManualArgs(regions=["us-east-1"], ignore_checks=["E3628"])
    for name, template in templates.items():
        assert [f"{name} {one.rule.id} {one.message}" for one in lint(json.dumps(template), config=wanted)] == []
