"""The settings: one file, `-c name=value` on top, and every refusal a sentence."""

from __future__ import annotations

import dataclasses
import json
import string
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from stacks.settings import Settings, read_settings
from stacks.storage_settings import EfsSettings, LustreSettings, VolumeSettings
from traincluster import Capacity, EfaLayout, Readiness, SshAccess
from trainrun.spec import ConfigError, TimeoutSpec

ROOT = Path(__file__).parents[2]
DEFAULT = ROOT / "cluster.yaml"


def read(context: dict[str, object] | None = None, *, file: Path = DEFAULT) -> Settings:
    return read_settings(context or {}, default_file=file)


def problems(context: dict[str, object], *, file: Path = DEFAULT) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        read(context, file=file)
    return caught.value.problems


@pytest.fixture
def write(tmp_path: Path):
    def write_file(text: str) -> Path:
        file = tmp_path / "other.yaml"
        file.write_text(text)
        return file

    return write_file


MINIMAL = "run: r\ninstance_type: c7i.2xlarge\nnodes: 1\ndata: corpus\n"


def test_the_default_file_is_a_cpu_cluster_that_trains_the_bundled_gpt():
    settings = read()
    assert (settings.instance_type, settings.nodes, settings.min_nodes) == ("c7i.2xlarge", 2, 1)
    assert (settings.entry_point, settings.source, settings.efa) == ("trainrun.pretrain", None, None)
    assert settings.parsed_capacity == Capacity.on_demand()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("run", "2026", "2026"),
        ("instance_type", "p5.48xlarge", "p5.48xlarge"),
        ("nodes", "4", 4),
        ("min_nodes", "null", None),
        ("capacity", "block:cr-0123456789abcdef0", "block:cr-0123456789abcdef0"),
        ("efa", "false", False),
        ("efa", "null", None),
        ("placement_group", "true", True),
        ("placement_group", "mine", "mine"),
        ("ami", "ami-0123456789abcdef0", "ami-0123456789abcdef0"),
        ("root_volume_gib", "200", 200),
        ("availability_zone", "us-east-1b", "us-east-1b"),
        ("isolated", "true", True),
        ("efa_layout", "efa", "efa"),
        ("efa_device_index", "1", 1),
        ("volumes", '[{"size_gib": 100, "path": "/data"}]', (VolumeSettings(size_gib=100, path="/data"),)),
        ("instance_store", "/scratch", "/scratch"),
        ("lustre.capacity_gib", "2400", LustreSettings(capacity_gib=2400)),
        ("efs.keep", "false", EfsSettings(keep=False)),
        ("os", "amazon-linux-2023", "amazon-linux-2023"),
        ("start_nodes", "false", False),
        ("processes_per_node", "2", 2),
        ("permissions_boundary", "Boundary", "Boundary"),
        ("region", "us-west-2", "us-west-2"),
        ("cidr", "10.7.0.0/20", "10.7.0.0/20"),
        ("flow_log_days", "14", 14),
        ("log_days", "7", 7),
        ("launcher", "mpirun", "mpirun"),
        ("numa", "exclusive", "exclusive"),
        ("container", "repository/train:1", "repository/train:1"),
        ("container_python", "python3.12", "python3.12"),
        ("requirements", "requirements.txt", "requirements.txt"),
        ("conda", "environment.yml", "environment.yml"),
        ("stop_signal", "SIGTERM", "SIGTERM"),
        ("termination_hook", "false", False),
        ("metrics_namespace", "Team", "Team"),
        ("metrics_namespace", "", ""),
        ("arguments", '["--x", "1"]', ("--x", "1")),
        ("environment.X", "1", {"X": "1"}),
        ("data", "s3://bucket/corpus", "s3://bucket/corpus"),
        ("publish_seconds", "5", 5.0),
        ("on_success", "keep", "keep"),
        ("on_failure", "scale_to_zero", "scale_to_zero"),
        ("keep_minutes", "null", None),
        ("keep_minutes", "600", 600),
        ("notify", "someone@example.com", "someone@example.com"),
        ("readiness", "wait-condition", "wait-condition"),
        ("max_restarts", "3", 3),
        ("same_failures", "3", 3),
        ("max_replacements", "0", 0),
        ("bandwidth_check", "true", True),
        ("timeouts.meet", "60", TimeoutSpec(meet=60)),
    ],
)
def test_every_setting_can_be_given_on_the_command_line(name, text, value):
    settings = read({name: text})
    assert getattr(settings, name.partition(".")[0]) == value


def test_every_setting_is_in_the_test_above_or_needs_files():
    (mark,) = [mark for mark in test_every_setting_can_be_given_on_the_command_line.pytestmark if mark.name == "parametrize"]
    tested = {case[0].partition(".")[0] for case in mark.args[1]}
    elsewhere = {"source", "entry_point", "training", "python", "root_device", "ssh_from", "ssh_key_pair", "readiness_minutes"}
    assert tested | elsewhere == {field.name for field in dataclasses.fields(Settings)}


def test_a_nested_setting_leaves_its_neighbours_alone():
    before, after = read().training, read({"training.model.layers": "8"}).training
    assert after["model"] == {**before["model"], "layers": 8}
    assert {**after, "model": None} == {**before, "model": None}


def test_the_image_of_ones_own():
    image = read({"ami": "ami-0123456789abcdef0", "python": "/usr/bin/python3", "root_device": "/dev/xvda"}).image
    assert (image.ami, image.python, image.root_device_name) == ("ami-0123456789abcdef0", "/usr/bin/python3", "/dev/xvda")
    assert read().image is None


def test_awss_image_of_another_operating_system():
    image = read({"os": "amazon-linux-2023"}).image
    assert image.is_deep_learning and image.root_device_name == "/dev/xvda"


def test_ssh_takes_two_settings():
    settings = read({"ssh_from": '["10.20.0.0/16"]', "ssh_key_pair": "team"})
    assert settings.ssh == SshAccess(sources=["10.20.0.0/16"], key_pair="team")
    assert read().ssh is None


def test_the_layout_of_efa():
    layout = read({"efa_layout": "efa", "efa_device_index": "1"}).parsed_efa_layout
    assert layout == EfaLayout(kind="efa", device_index=1)
    assert read().parsed_efa_layout == EfaLayout()


def test_source_is_relative_to_the_settings_file(write):
    file = write(MINIMAL + "source: project\nentry_point: train.py\n")
    assert read(file=file).source == str(file.parent / "project")


def test_another_file_by_context(write):
    assert read({"settings": str(write(MINIMAL))}).run == "r"


def test_the_cdks_own_context_is_left_alone():
    context = {
        "aws:cdk:enable-path-metadata": True,
        "@aws-cdk/core:checkSecretUsage": True,
        "availability-zones:account=1:region=x": ["a"],
        "cdk-migrate/x": 1,
    }
    assert read(context) == read()


@pytest.mark.parametrize(
    ("context", "message"),
    [
        ({"nodez": "3"}, "Unknown setting 'nodez'"),
        ({"nodez": "3"}, "Did you mean 'nodes'?"),
        ({"timeouts.meat": "3"}, "Unknown setting 'timeouts.meat'"),
        ({"training.stepz": "3"}, "Unknown setting 'stepz' in training. Did you mean 'steps'?"),
        ({"nodes": "two"}, "nodes must be a whole number, not 'two'."),
        ({"nodes": "2.5"}, "nodes must be a whole number, not 2.5."),
        ({"efa": "maybe"}, "efa must be true or false, not 'maybe'."),
        ({"on_success": "stop"}, "on_success is 'stop'. Allowed: 'scale_to_zero', 'keep'."),
        ({"arguments": "--x"}, "arguments must be a list, not '--x'."),
        ({"instance_type": "c7i.2xlarg"}, "Did you mean c7i.2xlarge"),
        ({"capacity": "reserved"}, "capacity is 'reserved'. Allowed: 'on-demand', 'spot'"),
        ({"capacity": "block:42"}, "is given the reservation '42'"),
        ({"ami": "newest"}, "ami is 'newest'"),
        ({"python": "/usr/bin/python3"}, "python is '/usr/bin/python3', but describes the image in ami, which is not set"),
        ({"training.data": "x"}, "training.data is set. Set data instead"),
        ({"data": "/corpus"}, "data is '/corpus'. Give a folder of the dataset bucket"),
        ({"data": ""}, "data is ''"),
        ({"data": "null"}, "data is not set, but trainrun.pretrain trains on a token dataset"),
        ({"efa_layout": "old"}, "efa_layout is 'old'. Allowed: 'efa-only', 'efa'."),
        ({"efa_device_index": "2"}, "efa_device_index is 2. Allowed: 0, 1."),
        ({"ssh_from": '["10.0.0.0/8"]'}, "ssh_key_pair is empty. Give the name of an EC2 key pair"),
        ({"ssh_key_pair": "team"}, "ssh_from is empty, but a key pair is given"),
        ({"ssh_from": '["office"]', "ssh_key_pair": "team"}, "ssh_from holds 'office'. Allowed: IPv4 ranges"),
        ({"log_days": "2"}, "log_days is 2. Allowed by CloudWatch: 1, 3, 5, 7"),
        ({"flow_log_days": "0"}, "flow_log_days is 0. Allowed by CloudWatch"),
        ({"region": "virginia"}, "region is 'virginia'. Give the name of an AWS region"),
        ({"volumes": '[{"size": 1}]'}, "Unknown setting 'volumes[0].size'"),
        ({"settings": "no/such.yaml"}, "The settings file 'no/such.yaml' cannot be read"),
    ],
)
def test_what_is_wrong_is_told_by_name(context, message):
    assert any(message in problem for problem in problems(context))


def test_all_that_is_wrong_is_told_together():
    assert len(problems({"nodez": "3", "efa": "maybe", "nodes": "x"})) == 3
    assert len(problems({"capacity": "reserved", "ami": "newest", "training.steps": "0"})) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run: [", "is not YAML"),
        ("run: a\nrun: b\n", "the setting 'run' is there twice"),
        ("training: {steps: 1, steps: 2}\n" + MINIMAL, "the setting 'steps' is there twice"),
        ("- run\n", "must be a mapping of settings"),
        ("", "Setting 'run' is missing"),
        (MINIMAL + "training:\n", "training must be a mapping, not None"),
        (MINIMAL.replace("run: r", "run: 2026"), "run must be text, not 2026"),
        ("run: \xff\n", "Setting 'instance_type' is missing"),
    ],
)
def test_a_file_that_is_wrong_is_told_by_name(text, message, write):
    assert any(message in problem for problem in problems({}, file=write(text)))


def test_a_file_that_is_no_text_is_told(tmp_path):
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"run: \xff\xfe\n")
    assert any("cannot be read" in problem for problem in problems({}, file=file))


NAMES = st.sampled_from([field.name for field in dataclasses.fields(Settings)])
PATHS = st.builds(
    ".".join, st.lists(NAMES | st.text(string.ascii_lowercase + "_.", min_size=1, max_size=8), min_size=1, max_size=3)
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=12)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, max_size=8), inner, max_size=3),
    max_leaves=5,
)


def assert_sentences(error: ConfigError) -> None:
    for problem in error.problems:
        assert "\n" not in problem
        assert problem[-1] in ".?", problem
        assert "Traceback" not in problem and "object at 0x" not in problem


@given(st.dictionaries(PATHS, st.text(string.printable, max_size=12) | VALUES.map(json.dumps), max_size=3))
def test_any_command_line_is_read_or_refused_in_sentences(context):
    try:
        assert isinstance(read(context), Settings)
    except ConfigError as error:
        assert_sentences(error)


@given(content=st.dictionaries(NAMES | st.text(string.ascii_lowercase, max_size=8), VALUES, max_size=5))
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_read_or_refused_in_sentences(content, tmp_path):
    file = tmp_path / "any.yaml"
    file.write_text(yaml.safe_dump(content))
    try:
        assert isinstance(read(file=file), Settings)
    except ConfigError as error:
        assert_sentences(error)


@given(st.integers(1, 10_000), st.from_regex(r"[a-z0-9][a-z0-9-]{0,20}", fullmatch=True))
def test_what_is_given_is_what_is_read(nodes, run):
    settings = read({"nodes": str(nodes), "run": run})
    assert (settings.nodes, settings.run) == (nodes, run)


@pytest.mark.parametrize(
    ("context", "sentence"),
    [
        ({"placement_group": "yes"}, "placement_group is 'yes'. Write true or false"),
        ({"placement_group": ""}, "placement_group is ''. Write true or false"),
        ({"ami": "ami-0123456789abcdef0", "root_device": "sda1"}, "root_device is 'sda1'"),
        ({"ami": "ami-0123456789abcdef0", "python": "python3"}, "python is 'python3'"),
        ({"data": "../.."}, "data is '../..'"),
        ({"data": "s3://a..b/x"}, "data is 's3://a..b/x'"),
        ({"run": "a" * 2000}, "at most 63"),
        ({"environment.A": "${Token[X.1]}"}, "environment.A: '${Token[' is how the CDK writes references"),
        ({"arguments": '["x", "${Token[X.1]}"]'}, "arguments: '${Token['"),
    ],
)
def test_what_ec2_or_a_node_would_refuse_is_refused(context, sentence):
    assert sentence in "\n".join(problems(context))


def test_a_deepspeed_file_lies_beside_the_settings_file(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    file = tmp_path / "cluster.yaml"
    file.write_text("run: r\ninstance_type: p4d.24xlarge\nnodes: 1\ndata: corpus\ntraining:\n  deepspeed: ds.json\n")
    settings = read_settings({}, default_file=file)
    assert settings.training["deepspeed"] == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("context", "problem"),
    [
        ({"readiness_minutes": "9"}, "readiness is 'none', which waits for nothing"),
        ({"readiness": "signal", "start_nodes": "false"}, "start_nodes is false: there is no node to wait for"),
        ({"readiness": "signal", "readiness_minutes": "61"}, "Allowed for 'signal': 1 to 60"),
        ({"notify": "nobody"}, "Give an e-mail address"),
        ({"keep_minutes": "0"}, "keep_minutes is 0"),
    ],
)
def test_ends_and_readiness_that_cannot_be_are_refused(context, problem):
    with pytest.raises(ConfigError, match=problem):
        read(context)


def test_the_time_to_wait_follows_the_setting():
    assert read({"readiness": "wait-condition"}).parsed_readiness == Readiness.wait_condition(timeout_minutes=30)
    assert read({"readiness": "signal", "readiness_minutes": "50"}).parsed_readiness == Readiness.signal(timeout_minutes=50)
