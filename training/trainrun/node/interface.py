"""The network interface that holds an address, asked of the kernel at run time."""

from __future__ import annotations

import ipaddress
import socket
import struct

SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B  # linux/sockios.h; other systems refuse them, and the interface stays unknown


def interface_of(address: str) -> str:
    """Name of the interface with this IPv4 address, the loopback interface for all of 127.0.0.0/8, "" when unknown."""
    wanted = "127.0.0.1" if ipaddress.ip_address(address).is_loopback else address
    for _, name in socket.if_nameindex():
        if _ask(name, SIOCGIFADDR) == wanted:
            return name
    return ""


def network_of(address: str) -> str:
    """The network of the interface with this IPv4 address, such as "10.0.16.0/20"; "" when unknown, and for loopback."""
    interface = interface_of(address)
    if not interface or ipaddress.ip_address(address).is_loopback:
        return ""
    return str(ipaddress.ip_network(f"{address}/{_ask(interface, SIOCGIFNETMASK)}", strict=False))


def _ask(interface: str, question: int) -> str:
    """An address that the kernel knows of an interface, or ""."""
    import fcntl

    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, question, request)
        except OSError:  # no IPv4 address
            return ""
    return socket.inet_ntoa(answer[20:24])
