"""The reference stacks with rich settings, deployed to the emulated AWS and destroyed again."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((ROOT / "tests" / "stacks" / "samples").glob("*.yaml"))
NODES = {"capacity_block": 4, "isolated": 2, "spot": 0, "waiting": 2}
OVER = {"waiting": ("-c", "readiness=none", "-c", "readiness_minutes=null")}
"""No node boots here that could say that it is ready; where nodes do, `tests/end_to_end/test_readiness.py` waits for them."""
KEPT = {"AWS::KMS::Key", "AWS::S3::Bucket", "AWS::S3::BucketPolicy"}
"""What the synth of the data stack says stays."""


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_sample_deploys_and_leaves_what_it_said(sample, account, tmp_path):
    before = account.resources()
    over = OVER.get(sample.stem, ())
    account.cdk("synth", "--quiet", "--output", tmp_path, "-c", f"settings={sample}", *over, cwd=ROOT)
    account.cdk("deploy", "--all", "--require-approval", "never", "--app", tmp_path, cwd=ROOT)
    nodes = account.resources().get("AWS::EC2::Instance", set()) - before.get("AWS::EC2::Instance", set())
    assert len(nodes) == NODES[sample.stem]  # whatever EC2 would refuse to launch is not there
    account.cdk("destroy", "--all", "--force", "--app", tmp_path, cwd=ROOT)
    left = account.resources()
    assert {kind for kind in left if left[kind] - before.get(kind, set())} <= KEPT
