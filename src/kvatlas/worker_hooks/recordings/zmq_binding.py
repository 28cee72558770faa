"""Binding a ZMQ socket without taking away what lies at its path; needs the extra `bridge`."""

import contextlib
import os
from pathlib import Path
from typing import Any

import zmq

from kvatlas.common.own_files import FILE_MODE, has_stale_socket


def bind(socket: "zmq.Socket[Any]", endpoint: str) -> None:
    """Bind a socket. Raises ZMQError, and ForeignFile for a path at which no dead socket lies.

    ZMQ itself would remove any file there. Only this user may connect to a socket with a path.
    """
    scheme, _, address = endpoint.partition("://")
    # * asks for a path of ZMQ's own, @ is for names without a file
    has_path = scheme == "ipc" and bool(address) and address[0] not in "*@"
    if has_path:
        has_stale_socket(Path(address), "name another --endpoint")
    socket.bind(endpoint)
    if has_path:
        with contextlib.suppress(OSError):
            os.chmod(address, FILE_MODE)
