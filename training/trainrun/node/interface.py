"""The network interface that holds an address, asked of the kernel at run time."""

from __future__ import annotations

import ipaddress
import socket
import struct

SIOCGIFADDR = 0x8915  # linux/sockios.h; other systems refuse it, and the interface stays unknown


def interface_of(address: str) -> str:
    """Name of the interface with this IPv4 address, the loopback interface for all of 127.0.0.0/8, "" when unknown."""
    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
    for _, name in socket.if_nameindex():
        if _address_of(name) == wanted:
            return name
    return ""


def _address_of(interface: str) -> str:
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
        except OSError:  # no IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])
