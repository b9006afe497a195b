"""Free ports that no other process gets while their owner is down for a while.

CEPHEID_FREE_PORTS=20000-25999 in the environment: only these. Give each of several clusters its own range: a port whose
server is just being started looks free.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Collection

# Below the range for outgoing connections (32768 on Linux, 49152 on macOS), which would block a restart.
_FIRST, _LAST = 20_000, 32_000


def free_port(wanted: int | None = None, *, taken: Collection[int] = ()) -> int:
    """Return `wanted` if it is free, otherwise any free port that is not in `taken`."""
    if wanted is not None and wanted not in taken and _is_free(wanted):
        return wanted
    first, last = _range()
    while True:
        port = random.randint(first, last)
        if port not in taken and _is_free(port):
            return port


def is_taken(port: int) -> bool:
    """Return whether a process listens there."""
    return _bind_error(port) == errno.EADDRINUSE


def _range() -> tuple[int, int]:
    given = os.environ.get("CEPHEID_FREE_PORTS", "")
    if not given:
        return _FIRST, _LAST
    first, _, last = given.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise ValueError(f"CEPHEID_FREE_PORTS is {given!r}; write it like {_FIRST}-{_LAST}, the first and the last port")
    return int(first), int(last)


def _is_free(port: int) -> bool:
    return _bind_error(port) is None


def _bind_error(port: int) -> int | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores connections that ended a moment ago
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.errno
    return None
