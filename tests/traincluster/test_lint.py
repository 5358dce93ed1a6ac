"""cfn-lint and cdk-nag on what the library makes. Every finding that stays is acknowledged, here or in code, with its reason."""

from __future__ import annotations

import json

import aws_cdk as cdk
import pytest
from cdk_nag import AwsSolutionsChecks
from cfnlint.api import ManualArgs, lint

from traincluster import Capacity

TYPES = {
    "p5.48xlarge": {"capacity": Capacity.block("cr-0123456789abcdef0")},
    "trn1.32xlarge": {"capacity": Capacity.spot()},
    "p4d.24xlarge": {"network": {"isolated": True}},
    "c7i.2xlarge": {},
    "g5.12xlarge": {"capacity": Capacity.spot(instance_types=["g6.12xlarge"])},
}


@pytest.mark.parametrize("name", TYPES)
def test_cfn_lint_finds_no_error_and_no_warning(name, synthesize):
    cluster = synthesize(instance_type=name, **TYPES[name])
    findings = lint(json.dumps(cluster.template), config=ManualArgs(regions=["us-east-1"]))
    assert [f"{finding.rule.id} {finding.message}" for finding in findings] == []


def test_cfn_lint_would_find_a_wrong_property(synthesize):
    template = json.loads(json.dumps(synthesize().template))
    (name,) = synthesize().resources("AWS::EC2::LaunchTemplate")
    template["Resources"][name]["Properties"]["LaunchTemplateData"]["NetworkCards"] = []
    findings = lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))
    assert any("NetworkCards" in finding.message for finding in findings)


@pytest.mark.parametrize("name", TYPES)
def test_cdk_nag_finds_nothing_that_is_not_meant(name, synthesize):
    cluster = synthesize(instance_type=name, **TYPES[name])
    app = cluster.stack.node.root
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    # The finding's name holds the bucket's logical id, which the library does not know when it acknowledges the others.
    cdk.Validations.of(cluster.cluster).acknowledge(
        cdk.Acknowledgment(
            id="AwsSolutions-IAM5[Resource::<Checkpoints620E2F20.Arn>/test-run/*]",
            reason="IAM names objects by pattern: this is the folder of the one run.",
        )
    )
    app.synth()  # raises on any finding


def test_cdk_nag_would_find_a_wildcard(synthesize):
    cluster = synthesize()
    app = cluster.stack.node.root
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    with pytest.raises(RuntimeError, match=r"IAM5\[Resource::<Checkpoints620E2F20.Arn>/test-run/\*\]"):
        app.synth()
