"""The whole grammar of the settings: what is accepted makes templates that pass, what is refused is told in sentences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
from cfnlint.api import ManualArgs, lint
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from stacks.settings import Settings, read_settings
from stacks.storage_settings import EfsSettings, LustreSettings, VolumeSettings
from stacks.training_cluster_stack import TrainingClusterStack
from stacks.training_data_stack import TrainingDataStack
from traincluster.rules import rules

ROOT = Path(__file__).parents[2]
FLAGS = json.loads((ROOT / "cdk.json").read_text())["context"]
RESERVATION = "cr-0123456789abcdef0"
AMI = "ami-0123456789abcdef0"

TYPES = ("c7i.2xlarge", "g5.xlarge", "g6e.48xlarge", "p4d.24xlarge", "p5.48xlarge", "p6-b300.48xlarge", "trn1.32xlarge")
WRONG_TYPES = ("p5.48xlarg", "dl1.24xlarge", "p3.16xlarge", "c5n.4xlarge")

# For each setting, values that are right somewhere, and some that are right nowhere.
GRAMMAR: dict[str, st.SearchStrategy[Any]] = {
    "run": st.sampled_from(["r", "llama-3", "a/b"]),
    "instance_type": st.sampled_from(TYPES * 3 + WRONG_TYPES),
    "nodes": st.sampled_from([1, 2, 16, 500, 0]),
    "min_nodes": st.sampled_from([None, 1, 2, 17]),
    "start_nodes": st.booleans(),
    "processes_per_node": st.sampled_from([None, 1, 8, 0]),
    "capacity": st.sampled_from(
        [
            *("on-demand", "spot", "spot:p4de.24xlarge", "spot with rebalancing", "free", "block:42"),
            *(f"reservation:{RESERVATION}", f"reservation:{RESERVATION} in group"),
            *(f"block:{RESERVATION}", f"block:{RESERVATION} until 2030-12-24T11:30Z"),
        ]
    ),
    "efa": st.sampled_from([None, None, True, False]),
    "efa_layout": st.sampled_from(["efa-only", "efa", "both"]),
    "efa_device_index": st.sampled_from([0, 1, 2]),
    "placement_group": st.sampled_from([None, True, False, "mine"]),
    "ami": st.sampled_from([None, None, AMI, "/my/image", "newest"]),
    "os": st.sampled_from([None, "ubuntu-22.04", "ubuntu-24.04", "amazon-linux-2023", "rhel-9", "plan9"]),
    "python": st.sampled_from([None, None, "/usr/bin/python3"]),
    "root_device": st.sampled_from([None, None, "/dev/xvda"]),
    "root_volume_gib": st.sampled_from([None, 200, 8]),
    "volumes": st.lists(
        st.fixed_dictionaries(
            {"size_gib": st.sampled_from([100, 0]), "path": st.sampled_from(["/data", "/more", "data"])},
            optional={
                "type": st.sampled_from(["gp3", "io2"]),
                "iops": st.sampled_from([None, 16_000, 10**7]),
                "throughput_mib_s": st.sampled_from([None, 500, 9]),
                "keep": st.booleans(),
            },
        ),
        max_size=2,
    ),
    "lustre": st.none()
    | st.fixed_dictionaries(
        {"capacity_gib": st.sampled_from([1200, 4800, 38_400, 1000])},
        optional={
            "path": st.sampled_from(["/fsx", "/data"]),
            "deployment": st.sampled_from(["SCRATCH_2", "PERSISTENT_2"]),
            "storage": st.sampled_from(["SSD", "INTELLIGENT_TIERING"]),
            "throughput_per_tib": st.sampled_from([None, 125, 1000, 7]),
            "throughput": st.sampled_from([None, 4000]),
            "metadata_iops": st.sampled_from([None, 12_000, 1]),
            "efa": st.booleans(),
            "link_datasets": st.booleans(),
            "keep": st.booleans(),
        },
    ),
    "efs": st.none()
    | st.fixed_dictionaries({}, optional={"path": st.just("/efs"), "encrypt_in_transit": st.booleans(), "keep": st.booleans()}),
    "instance_store": st.sampled_from([None, "/scratch", "scratch"]),
    "region": st.sampled_from([None, "us-east-1", "us-gov-west-1", "cn-north-1", "moon"]),
    "availability_zone": st.sampled_from([None, "us-east-1b", "use1-az4"]),
    "isolated": st.booleans(),
    "cidr": st.sampled_from([None, "10.7.0.0/20", "10.7.0.0/26", "10.0.0.0/8"]),
    "flow_log_days": st.sampled_from([None, 7, 8]),
    "log_days": st.sampled_from([1, 30, 31]),
    "ssh_from": st.sampled_from([[], ["10.0.0.0/8"], ["0.0.0.0/0"], ["office"]]),
    "ssh_key_pair": st.sampled_from([None, "team"]),
    "permissions_boundary": st.sampled_from([None, "Boundary"]),
    "source": st.sampled_from([None, "demo", "no-such-folder"]),
    "entry_point": st.sampled_from(["trainrun.pretrain", "display.py", "nowhere.py", "./display.py", "/bin/true", "./nowhere"]),
    "launcher": st.sampled_from(["torchrun", "mpirun"]),
    "numa": st.sampled_from(["auto", "none", "node", "socket", "cores"]),
    "metrics_namespace": st.sampled_from(["Traincluster", "", "AWS/EC2"]),
    "arguments": st.sampled_from([[], ["--x", "1"]]),
    "environment": st.sampled_from([{}, {"X": "1"}, {"1X": "1"}]),
    "data": st.sampled_from(["corpus", "s3://bucket/corpus", None, "/corpus"]),
    "training": st.sampled_from([{}, {"steps": 10}, {"stepz": 10}]),
    "publish_seconds": st.sampled_from([1.0, 0.0]),
    "container": st.sampled_from(["", "repository/train:1", "No Image"]),
    "container_python": st.sampled_from(["python3", "python3.12"]),
    "requirements": st.sampled_from(["", "requirements.txt"]),
    "conda": st.sampled_from(["", "environment.yml"]),
    "notify": st.sampled_from([None, "someone@example.com", "nobody"]),
    "readiness": st.sampled_from(["none", "signal", "wait-condition", "maybe"]),
    "readiness_minutes": st.sampled_from([None, 15, 0, 600]),
    "keep_minutes": st.sampled_from([None, 120, 0]),
    "on_success": st.sampled_from(["scale_to_zero", "keep", "party"]),
    "on_failure": st.sampled_from(["scale_to_zero", "keep"]),
    "max_restarts": st.sampled_from([0, 5, -1]),
    "same_failures": st.sampled_from([2, 5, 1]),
    "max_replacements": st.sampled_from([0, 5, -1]),
    "bandwidth_check": st.booleans(),
    "stop_signal": st.sampled_from(["", "SIGTERM", "SIGUSR1", "SIGKILL"]),
    "termination_hook": st.sampled_from([None, True, False]),
    "timeouts": st.sampled_from([{}, {"meet": 60}, {"meat": 60}]),
}
MINIMAL = {"run": "r", "instance_type": "c7i.2xlarge", "nodes": 2, "data": "corpus"}


def test_the_grammar_is_the_whole_grammar():
    assert set(GRAMMAR) == {field.name for field in dataclasses.fields(Settings)}


# Few settings at a time: with all of them drawn at once nearly everything is refused for the same few reasons.
CHANGES = st.lists(st.sampled_from(sorted(GRAMMAR)), max_size=5, unique=True).flatmap(
    lambda names: st.fixed_dictionaries({name: GRAMMAR[name] for name in names})
)
SENSIBLE = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


class Refused(Exception):
    """What a user sees instead of a template."""

    def __init__(self, sentences: list[str]) -> None:
        self.sentences = sentences


def synthesize(given_settings: dict[str, Any], outdir: Path) -> list[dict[str, Any]]:
    """The templates of both stacks, made as app.py makes them; raises Refused with all that is wrong."""
    try:
        read = read_settings(given_settings, default_file=outdir / "settings.yaml")
        app = cdk.App(context=FLAGS, outdir=str(outdir / "assembly"), stack_traces=False)
        data = TrainingDataStack(app, "TrainingDataStack", region=read.region)
        cluster = TrainingClusterStack(
            app, "TrainingClusterStack", settings=read, checkpoints=data.checkpoints, datasets=data.datasets
        )
    except ValueError as error:
        raise Refused(str(error).splitlines()) from None
    errors = [sentence for construct in cluster.node.find_all() for sentence in construct.node.validate()]
    if errors:
        raise Refused(errors)
    return [stack.template for stack in app.synth().stacks]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "settings.yaml").write_text(json.dumps(MINIMAL))  # JSON is YAML
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "display.py").write_text("")
    return tmp_path


WORDS = {
    name
    for one in (Settings, LustreSettings, EfsSettings, VolumeSettings)
    for name in (field.name for field in dataclasses.fields(one))
}


def assert_helpful(sentence: str) -> None:
    """One line that ends as a sentence does, and that names a setting, a value or the rule that was broken."""
    assert "\n" not in sentence and "Traceback" not in sentence and "object at 0x" not in sentence
    assert sentence.rstrip().endswith((".", "?", "]")), sentence
    names_setting = any(word in sentence for word in WORDS)
    names_rule = any(sentence.endswith(f"[{rule.name}]") for rule in rules())
    assert names_setting or names_rule, sentence


@given(changes=CHANGES)
@SENSIBLE
def test_any_settings_make_templates_or_sentences(changes, folder):
    try:
        templates = synthesize(changes, folder)
    except Refused as refused:
        event("refused")
        assert refused.sentences
        for sentence in refused.sentences:
            assert_helpful(sentence)
    else:
        event("accepted")
        assert [template["Description"].split(":")[0] for template in templates] == ["Traincluster", "Traincluster"]


SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.yaml"))


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_a_rich_sample_passes_cfn_lint(sample, tmp_path):
    wanted = ManualArgs(regions=["us-east-1"], ignore_checks=["W6001"])  # RunLocation repeats an import, for a person to read
    for template in synthesize({"settings": str(sample)}, tmp_path):
        assert [f"{one.rule.id} {one.message}" for one in lint(json.dumps(template), config=wanted)] == []
