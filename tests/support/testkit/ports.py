"""Ports for servers that come and go: nobody else takes one while its server is away.

They are out of those that systems give to nobody by themselves, and processes that run tests keep
off the ports of one another.
"""

import contextlib
import socket
import sys
from random import SystemRandom

#: Linux gives out those from 32768 on, macOS from 49152
_PORTS = range(20_000, 32_000)
_random = SystemRandom()


def kept_port() -> int:
    """Return a port of the loopback that is free, and ours until this process ends."""
    return kept_ports(1)


def kept_ports(num: int) -> int:
    """Return the first of so many ports in a row; see `kept_port`."""
    while True:
        first = _random.randrange(_PORTS.start, _PORTS.stop - num)
        if all(map(_is_kept, range(first, first + num))):
            return first


def _is_kept(port: int) -> bool:
    """Keep a port; say whether nobody else has it."""
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return _is_marked(port)
    return False


def _is_marked(port: int) -> bool:
    """Mark a port by a name that one process at a time can have, and only while it runs."""
    if sys.platform != "linux":
        return True
    mark = socket.socket(socket.AF_UNIX)
    try:
        mark.bind(f"\0kvatlas port {port}")
    except OSError:
        mark.close()
        return False
    mark.detach()
    return True
