"""The user data: what is in it, and that it never outgrows what EC2 takes."""

from __future__ import annotations

import base64
import json
import re
import subprocess

import pytest

from traincluster import TrainingJob
from traincluster.payload import Payload
from traincluster.rules import check
from traincluster.rules.user_data import LIMIT_BYTES, UserDataFacts
from traincluster.user_data import REFERENCE_BYTES, most_bytes, render
from trainrun.spec import ClusterSpec, JobSpec, RunSpec, StorageSpec

SMALL = Payload(b"x" * 500)


def spec_for(payload: Payload, **job: object) -> RunSpec:
    return RunSpec(
        run="run",
        region="us-east-1",
        cluster=ClusterSpec(name="Stack/Cluster", instance_type="c7i.2xlarge", nodes_min=1, nodes_desired=1, nodes_max=1),
        job=JobSpec(entry_point="trainrun.pretrain", **job),
        storage=StorageSpec(location="s3://bucket"),
        payload_sha256=payload.sha256,
    )


def heredoc(document: str, word: str) -> str:
    (text,) = re.findall(rf"<<'{word}'\n(.*?)\n{word}\n", document, re.DOTALL)
    return text


def test_inline_document_holds_spec_digest_and_payload():
    document = render(spec_for(SMALL), SMALL)
    assert document.startswith("#!/bin/bash\n")
    assert RunSpec.from_json(heredoc(document, "RUN_JSON")) == spec_for(SMALL)
    assert base64.b64decode(heredoc(document, "ARCHIVE")) == SMALL.archive
    assert f"payload_sha256={SMALL.sha256}\n" in document
    assert "download_file" not in document


def test_asset_document_says_where_the_payload_is():
    document = render(spec_for(SMALL), SMALL, bucket="assets", key="payload.xz")
    assert "payload_region=us-east-1\npayload_bucket=assets\npayload_key=payload.xz\n" in document
    assert f"payload_sha256={SMALL.sha256}\n" in document
    assert "ARCHIVE" not in document


def test_the_bootstraps_comments_stay_at_home():
    body = render(spec_for(SMALL), SMALL).partition("\n")[2]
    assert not [line for line in body.splitlines() if line.lstrip().startswith("#")]


def test_quotes_in_arguments_cannot_leave_the_document():
    nasty = "'\"; rm -rf / #\nRUN_JSON\n$(reboot)"
    document = render(spec_for(SMALL, arguments=(nasty,)), SMALL)
    assert RunSpec.from_json(heredoc(document, "RUN_JSON")).job.arguments == (nasty,)


def test_each_reference_counts_as_its_longest_name(stack):
    region = stack.region  # unresolved
    assert most_bytes("abc") == 3
    assert most_bytes("é") == 2
    assert most_bytes(f"abc{region}def{region}") == 6 + 2 * REFERENCE_BYTES


def test_no_name_that_cloudformation_makes_is_longer():
    log_group = f"{'s' * 128}-{'l' * 255}-{'r' * 12}"
    assert len(log_group) <= REFERENCE_BYTES


def test_size_is_checked_to_the_byte():
    assert check(UserDataFacts(most_bytes=LIMIT_BYTES)) == ()
    (finding,) = check(UserDataFacts(most_bytes=LIMIT_BYTES + 1))
    assert "can be 16,385 bytes long, 1 more than the 16,384" in finding.message


def test_a_large_payload_becomes_an_asset(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    assert "ARCHIVE" not in cluster.user_data
    assert most_bytes_of_template(cluster) <= LIMIT_BYTES
    (info,) = [info for info in cluster.annotations["info"] if "payload" in info]
    assert "is an asset on S3" in info and "EC2 takes 16,384" in info


def test_a_small_payload_travels_inside(synthesize, monkeypatch):
    monkeypatch.setattr("traincluster.cluster.pack", lambda source: SMALL)
    cluster = synthesize()
    assert base64.b64decode(heredoc(cluster.user_data, "ARCHIVE")) == SMALL.archive
    assert most_bytes_of_template(cluster) <= LIMIT_BYTES
    (info,) = [info for info in cluster.annotations["info"] if "payload" in info]
    assert "travels inside the user data" in info


def test_a_document_that_cannot_fit_says_by_how_much(synthesize):
    job = TrainingJob(run="run", arguments=["x" * LIMIT_BYTES])
    with pytest.raises(RuntimeError, match=r"The user data can be ([\d,]+) bytes long, ([\d,]+) more than the 16,384") as caught:
        assert synthesize(job=job).template
    size, excess = (int(text.replace(",", "")) for text in re.findall(r"([\d,]+) (?:bytes long|more)", str(caught.value)))
    assert size - LIMIT_BYTES == excess > 0


def most_bytes_of_template(cluster) -> int:
    """The size that EC2 sees, with every reference as long as it can get."""
    parts = cluster.launch_data["UserData"]["Fn::Base64"]["Fn::Join"][1]
    return sum(len(part.encode()) if isinstance(part, str) else REFERENCE_BYTES for part in parts)


@pytest.mark.parametrize("name", ["p5.48xlarge", "trn2.48xlarge", "c7i.2xlarge"])
def test_user_data_fits_and_reads_back(name, cluster_of):
    cluster = cluster_of(name)
    assert most_bytes_of_template(cluster) <= LIMIT_BYTES
    found = json.loads(heredoc(cluster.user_data, "RUN_JSON"))
    assert found["cluster"]["instance_type"] == name
    assert found["storage"]["location"] == "s3://REFERENCE"


@pytest.mark.parametrize("name", ["p5.48xlarge", "c7i.2xlarge"])
def test_net_10_no_interface_name_is_hard_coded(name, cluster_of):
    text = cluster_of(name).user_data
    assert "SOCKET_IFNAME" not in text
    assert not re.search(r"\b(eth0|ens\d+|enp\d+s\d+)\b", text)


@pytest.mark.parametrize("path", ["/bin/python';touch x;'", "${Token[';touch x;']}", "$(touch x)", "a\nb"])
def test_the_path_of_python_runs_nothing_on_a_node(path):
    first_lines = render(spec_for(SMALL, python=path), SMALL).partition("payload_sha256=")[0]
    done = subprocess.run(
        ["bash", "-c", f'touch() {{ echo touched; }}\n{first_lines}printf %s "$image_python"'],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == path
