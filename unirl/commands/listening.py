"""Where a command listens: the address that was asked for, or why it cannot be had."""

from __future__ import annotations

import ipaddress
import socket

from unirl.config.rules import check_setting
from unirl.errors import UniRLError


def check_port(port: int, usual: int) -> None:
    check_setting(0 <= port < 65536, "port", port, "must be in [0, 65535]", str(usual))


def listen(command: str, host: str, port: int) -> socket.socket:
    """Raises UniRLError where the port is taken, or the address is not this machine's."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UniRLError(
            f"unirl {command} cannot listen on {host}:{port}",
            f"the system says: {error.strerror or error}",
            "choose another --port or --host; --port 0 takes any free port",
        ) from error


def is_own(host: str) -> bool:
    """Whether this machine alone reaches it."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host
