"""cfn-lint and cdk-nag on everything that storage makes."""

from __future__ import annotations

import json

import aws_cdk as cdk
import pytest
from aws_cdk import aws_kms as kms
from aws_cdk.assertions import Template
from cdk_nag import AwsSolutionsChecks
from cfnlint.api import ManualArgs, lint

from traincluster import DataRepository, DatasetBucket, ElasticFileSystem, LustreFileSystem, TrainingNetwork

LUSTRE = {
    "persistent": {"capacity_gib": 2400, "metadata_iops": 3000},
    "scratch": {"deployment": "SCRATCH_2", "capacity_gib": 1200},
    "hard disks": {"deployment": "PERSISTENT_1", "storage": "HDD", "capacity_gib": 6000},
    "efa": {"efa": True, "capacity_gib": 4800, "throughput_per_tib": 1000},
    "tiered": {"storage": "INTELLIGENT_TIERING", "throughput": 4000, "read_cache_gib": 4000},
    "kept": {"capacity_gib": 1200, "removal_policy": cdk.RemovalPolicy.RETAIN},
}


@pytest.fixture(params=LUSTRE)
def app(request, tmp_path) -> cdk.App:
    app = cdk.App(outdir=str(tmp_path))
    stack = cdk.Stack(app, "Stack")
    network = TrainingNetwork(stack, "Network")
    key = kms.Key(stack, "Key", enable_key_rotation=True)
    arguments = LUSTRE[request.param]
    if request.param != "tiered":
        bucket = DatasetBucket(stack, "Corpus", encryption_key=key)
        links = [DataRepository(bucket=bucket, prefix="web", path="/web"), DataRepository(bucket=bucket, prefix="x", path="/x")]
        arguments = {**arguments, "repositories": links}
    LustreFileSystem(stack, "Fsx", network=network, **arguments).node.find_all()
    ElasticFileSystem(stack, "Home", network=network, encryption_key=key)
    return app


def test_cfn_lint_finds_no_error_and_no_warning(app):
    (stack,) = (child for child in app.node.children if isinstance(child, cdk.Stack))
    template = Template.from_stack(stack).to_json()
    findings = lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))
    assert [f"{finding.rule.id} {finding.message}" for finding in findings] == []


def test_cdk_nag_finds_nothing(app):
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app))
    app.synth()  # raises on any finding
