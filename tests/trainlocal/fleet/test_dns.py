"""The name server, asked with packets made by hand."""

import contextlib
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainlocal.fleet.dns import NameServer, answer, node_name

A, PTR, AAAA = 1, 12, 28


def query(name, kind, identity=77):
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    return struct.pack(">HHHHHH", identity, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def read(packet):
    """(identity, status, record data or None)"""
    identity, flags, _, answers, _, _ = struct.unpack_from(">HHHHHH", packet)
    if not answers:
        return identity, flags & 0xF, None
    at = 12
    while packet[at]:
        at += 1 + packet[at]
    at += 5
    (length,) = struct.unpack_from(">H", packet, at + 10)
    return identity, flags & 0xF, packet[at + 12 : at + 12 + length]


def test_a_node_name_gives_its_address():
    assert read(answer(query("ip-10-0-17-5.ec2.internal", A), "us-east-1")) == (77, 0, bytes([10, 0, 17, 5]))


def test_names_of_other_regions_are_known_too():
    assert read(answer(query("IP-10-0-17-5.eu-west-1.compute.internal", A), "eu-west-1"))[2] == bytes([10, 0, 17, 5])


def test_an_address_gives_the_node_name():
    record = read(answer(query("5.17.0.10.in-addr.arpa", PTR), "us-east-1"))[2]
    assert record == b"\x0cip-10-0-17-5\x03ec2\x08internal\0"


def test_a_node_has_no_ipv6_address_and_that_is_no_error():
    assert read(answer(query("ip-10-0-17-5.ec2.internal", AAAA), "us-east-1")) == (77, 0, None)


@pytest.mark.parametrize("name", ["example.com", "s3.amazonaws.com", "ip-10-0-17.ec2.internal", "ip-10-0-17-256.ec2.internal"])
def test_no_other_name_is_known(name):
    assert read(answer(query(name, A), "us-east-1")) == (77, 3, None)


@given(st.tuples(*[st.integers(0, 255)] * 4), st.sampled_from(["us-east-1", "eu-central-1", "ap-southeast-2"]))
def test_names_and_addresses_are_each_others_inverse(parts, region):
    address = ".".join(map(str, parts))
    assert read(answer(query(node_name(address, region), A), region))[2] == bytes(parts)


@given(st.binary(max_size=64))
def test_rubbish_is_answered_or_refused_but_never_breaks_the_server(packet):
    with contextlib.suppress(ValueError, IndexError, struct.error):
        assert answer(packet, "us-east-1")[:2] == packet[:2]


def test_it_answers_over_udp_and_survives_rubbish():
    bound = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    bound.bind(("127.0.0.1", 0))
    server = NameServer(bound, "us-east-1")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
            asker.settimeout(5)
            asker.connect(bound.getsockname())
            asker.send(b"rubbish")
            asker.send(query("ip-10-0-0-9.ec2.internal", A, identity=5))
            assert read(asker.recv(512)) == (5, 0, bytes([10, 0, 0, 9]))
    finally:
        server.close()
