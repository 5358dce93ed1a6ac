"""Links, addresses and routes through rtnetlink(7), so that no `ip` command has to be on the machine."""

from __future__ import annotations

import os
import socket
import struct

_NEWLINK, _NEWADDR, _NEWROUTE = 16, 20, 24
_REQUEST, _ACK, _EXCL, _CREATE = 0x1, 0x4, 0x200, 0x400
_ERROR = 2  # NLMSG_ERROR: the answer to a request that asked for an acknowledgement
_IFF_UP = 0x1

_IFLA_ADDRESS, _IFLA_IFNAME, _IFLA_MASTER, _IFLA_LINKINFO, _IFLA_NET_NS_FD = 1, 3, 10, 18, 28
_IFLA_INFO_KIND, _IFLA_INFO_DATA, _VETH_INFO_PEER = 1, 2, 1
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_OIF = 4
_TABLE_MAIN, _PROTOCOL_STATIC, _SCOPE_LINK, _TYPE_UNICAST = 254, 4, 253, 1


def _attribute(kind: int, value: bytes) -> bytes:
    length = 4 + len(value)
    return struct.pack("=HH", length, kind) + value + b"\0" * (-length % 4)


def _link_header(index: int = 0, up: bool = False) -> bytes:
    flags = _IFF_UP if up else 0
    return struct.pack("=BxHiII", socket.AF_UNSPEC, 0, index, flags, flags)


def _request(kind: int, body: bytes, create: bool = False) -> None:
    flags = _REQUEST | _ACK | (_CREATE | _EXCL if create else 0)
    message = struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as link:
        link.send(message)
        answer = link.recv(65536)
    _, answer_kind, _, _, _ = struct.unpack_from("=IHHII", answer)
    assert answer_kind == _ERROR, f"netlink answered with message {answer_kind}, not with an acknowledgement"
    (number,) = struct.unpack_from("=i", answer, 16)
    if number:
        raise OSError(-number, f"netlink request {kind}: {os.strerror(-number)}")


def index_of(name: str) -> int:
    """The kernel's number of the interface called `name` in the present network namespace."""
    return socket.if_nametoindex(name)


def set_up(name: str) -> None:
    """Bring an interface up."""
    _request(_NEWLINK, _link_header(index_of(name), up=True))


def add_bridge(name: str, mac: bytes) -> None:
    """Make a bridge and bring it up.

    A bridge without an address of its own borrows that of a port. When the port goes, with a node that dies, the address
    changes, and the other nodes send into the void until they have forgotten the old one.
    """
    kind = _attribute(_IFLA_LINKINFO, _attribute(_IFLA_INFO_KIND, b"bridge"))
    names = _attribute(_IFLA_IFNAME, name.encode() + b"\0") + _attribute(_IFLA_ADDRESS, mac)
    _request(_NEWLINK, _link_header() + names + kind, create=True)
    set_up(name)


def add_veth(name: str, bridge: str, peer: str, peer_namespace: int, peer_mac: bytes) -> None:
    """Make a pair of virtual Ethernet interfaces: `name` on `bridge` here, `peer` in the namespace of a descriptor."""
    there = (
        _link_header()
        + _attribute(_IFLA_IFNAME, peer.encode() + b"\0")
        + _attribute(_IFLA_ADDRESS, peer_mac)
        + _attribute(_IFLA_NET_NS_FD, struct.pack("=I", peer_namespace))
    )
    data = _attribute(_IFLA_INFO_DATA, _attribute(_VETH_INFO_PEER, there))
    information = _attribute(_IFLA_LINKINFO, _attribute(_IFLA_INFO_KIND, b"veth") + data)
    master = _attribute(_IFLA_MASTER, struct.pack("=I", index_of(bridge)))
    _request(_NEWLINK, _link_header() + _attribute(_IFLA_IFNAME, name.encode() + b"\0") + master + information, create=True)
    set_up(name)


def add_address(name: str, address: str, prefix: int) -> None:
    """Give an interface an IPv4 address with the given prefix length."""
    raw = socket.inet_aton(address)
    header = struct.pack("=BBBBi", socket.AF_INET, prefix, 0, 0, index_of(name))
    _request(_NEWADDR, header + _attribute(_IFA_LOCAL, raw) + _attribute(_IFA_ADDRESS, raw), create=True)


def add_default_route(name: str) -> None:
    """Send all that has no better route out of `name`, each destination being asked for on the link itself."""
    header = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, _TABLE_MAIN, _PROTOCOL_STATIC, _SCOPE_LINK, _TYPE_UNICAST, 0)
    _request(_NEWROUTE, header + _attribute(_RTA_OIF, struct.pack("=i", index_of(name))), create=True)
