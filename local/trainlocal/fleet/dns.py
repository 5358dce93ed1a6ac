"""The name server of one node's network: it knows the names of nodes, both ways, and nothing else.

A VPC's own server answers at 169.254.169.253; the private name of an instance holds its address
(ip-10-0-0-5.ec2.internal in us-east-1, ip-10-0-0-5.REGION.compute.internal elsewhere), so no table is needed.
Source: Amazon VPC User Guide, "DNS attributes for your VPC".
"""

from __future__ import annotations

import re
import socket
import struct
import threading

_A, _PTR = 1, 12
_NO_ERROR, _NO_SUCH_NAME = 0, 3
_LIFETIME = 60

_NODE_NAME = re.compile(r"ip-(\d{1,3})-(\d{1,3})-(\d{1,3})-(\d{1,3})(\.ec2\.internal|\.[a-z0-9-]+\.compute\.internal)")
_REVERSE_NAME = re.compile(r"(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.(\d{1,3})\.in-addr\.arpa")


def node_domain(region: str) -> str:
    """The domain of private names in a region."""
    return "ec2.internal" if region == "us-east-1" else f"{region}.compute.internal"


def node_name(address: str, region: str) -> str:
    """The private name of the instance with the private IPv4 `address`."""
    return f"ip-{address.replace('.', '-')}.{node_domain(region)}"


def _encoded(name: str) -> bytes:
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def _question(packet: bytes) -> tuple[str, int, int]:
    """Name, type and end of the one question in a packet."""
    labels, at = [], 12
    while packet[at]:
        labels.append(packet[at + 1 : at + 1 + packet[at]].decode("ascii"))
        at += 1 + packet[at]
    (kind,) = struct.unpack_from(">H", packet, at + 1)
    return ".".join(labels).lower(), kind, at + 5


def answer(packet: bytes, region: str) -> bytes:
    """The answer to a query packet. Raises ValueError, IndexError or struct.error for what is not a query."""
    identity, flags, questions = struct.unpack_from(">HHH", packet)
    if questions != 1:
        raise ValueError("not a query with one question")
    name, kind, end = _question(packet)
    record, known = b"", False
    if match := _NODE_NAME.fullmatch(name):
        known = all(int(part) < 256 for part in match.groups()[:4])
        if known and kind == _A:
            record = bytes(int(part) for part in match.groups()[:4])
    elif match := _REVERSE_NAME.fullmatch(name):
        known = True
        if kind == _PTR:
            record = _encoded(node_name(".".join(reversed(match.groups())), region))
    status = _NO_ERROR if known else _NO_SUCH_NAME
    # 0x8080: an answer, recursion available; the asker's wish for recursion (0x0100) is repeated.
    header = struct.pack(">HHHHHH", identity, 0x8080 | (flags & 0x0100) | status, 1, 1 if record else 0, 0, 0)
    body = struct.pack(">HHHIH", 0xC00C, kind, 1, _LIFETIME, len(record)) + record if record else b""
    return header + packet[12:end] + body


class NameServer:
    """Answers on a bound UDP socket, from a thread of its own, until `close`."""

    def __init__(self, bound: socket.socket, region: str) -> None:
        self._socket, self._region, self._closed = bound, region, False
        self._socket.settimeout(0.2)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closed:
            try:
                packet, asker = self._socket.recvfrom(4096)
                self._socket.sendto(answer(packet, self._region), asker)
            except (TimeoutError, ValueError, IndexError, struct.error):
                continue  # silence is the right answer to what is not a query
            except OSError:
                return

    def close(self) -> None:
        """Stop answering and close the socket."""
        self._closed = True
        self._thread.join()
        self._socket.close()
