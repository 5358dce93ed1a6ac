"""SSH: only when asked for, only from the given ranges; Session Manager's commands."""

from __future__ import annotations

import json
import shlex

import pytest

from traincluster import SshAccess
from traincluster.access import forwarding_command, session_command


def open_ports(cluster) -> list[tuple[str, int]]:
    """Every (range, port) that the nodes' group lets in from addresses."""
    groups = [one for name, one in cluster.resources("AWS::EC2::SecurityGroup").items() if name.startswith("Cluster")]
    rules = [rule for group in groups for rule in group["Properties"].get("SecurityGroupIngress", [])]
    return [(rule["CidrIp"], rule["FromPort"]) for rule in rules]


def test_without_asking_no_port_is_open(cluster_of):
    cluster = cluster_of("c7i.2xlarge")
    assert open_ports(cluster) == []
    assert "KeyName" not in cluster.launch_data


def test_ssh_is_let_in_from_the_given_ranges_alone(synthesize):
    cluster = synthesize(ssh=SshAccess(sources=["10.20.0.0/16", "192.168.1.7/32"], key_pair="team"))
    assert open_ports(cluster) == [("10.20.0.0/16", 22), ("192.168.1.7/32", 22)]
    assert cluster.launch_data["KeyName"] == "team"


@pytest.mark.parametrize("source", ["10.20.0.1/16", "somewhere", "", "10.0.0.0/33", "fd00::/8"])
def test_what_is_no_range_is_refused(source):
    with pytest.raises(ValueError, match=r"ssh_from holds .*Allowed: IPv4 ranges"):
        SshAccess(sources=[source], key_pair="team")


def test_half_of_it_is_refused():
    with pytest.raises(ValueError, match="ssh_from is empty, but a key pair is given"):
        SshAccess(sources=[], key_pair="team")
    with pytest.raises(ValueError, match="ssh_key_pair is empty"):
        SshAccess(sources=["10.0.0.0/8"], key_pair="")


def test_everywhere_stops_the_synth(synthesize):
    cluster = synthesize(ssh=SshAccess(sources=["0.0.0.0/0"], key_pair="team"))
    (error,) = cluster.cluster.node.validate()
    assert "[ssh-from-anywhere]" in error and "Session Manager" in error


def test_a_public_range_is_warned_of(synthesize):
    cluster = synthesize(ssh=SshAccess(sources=["203.0.114.0/24"], key_pair="team"))
    assert any("nodes have no public address" in text for text in cluster.annotations["warning"])


def test_the_commands_are_what_a_shell_reads():
    command = session_command("Group")
    assert command.startswith("aws ssm start-session --target $(aws autoscaling describe-auto-scaling-groups")
    words = shlex.split(forwarding_command("Group", 8888))
    assert words[words.index("--document-name") + 1] == "AWS-StartPortForwardingSession"
    assert json.loads(words[words.index("--parameters") + 1]) == {"portNumber": ["8888"], "localPortNumber": ["8888"]}
