"""Keeps the process of the emulated cloud on this machine."""

from __future__ import annotations

import ipaddress
import os
import sys
from typing import Any


def fence_off() -> None:
    """Takes away what could make a library of this process look beyond the machine, for as long as the process lives.

    The environment loses everything that points to a user's own account, and a connection to anything but a loopback
    address, or a name to be looked up, is refused before a packet of it is sent (moto delivers notifications to web
    addresses, for one).
    """
    for name in [name for name in os.environ if name.startswith(("AWS_", "MOTO_"))]:
        del os.environ[name]
    os.environ.update(
        AWS_EC2_METADATA_DISABLED="true",
        AWS_CONFIG_FILE=os.devnull,
        AWS_SHARED_CREDENTIALS_FILE=os.devnull,
        MOTO_IAM_LOAD_MANAGED_POLICIES="true",
    )
    sys.addaudithook(_refuse_to_leave)


def _refuse_to_leave(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "socket.connect":
        address = arguments[1]
        if isinstance(address, tuple) and not _is_loopback(address[0]):
            raise ConnectionRefusedError(f"the emulated cloud does not connect to {address[0]}: it stays on this machine")
    elif event in ("socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"):
        host = arguments[0]
        if host not in (None, "", "localhost") and _address(host) is None:
            raise ConnectionRefusedError(f"the emulated cloud does not look up {host}: it stays on this machine")


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address(host: Any) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host)
    except ValueError:
        return None
