"""One ZooKeeper server for a whole run of pytest, started by the first test that asks. Each test keeps to a chroot of its own.

@pytest.fixture
def zookeeper_url() -> str:
    return new_zookeeper_url()                      # zk://127.0.0.1:port/t7, empty

A test that breaks the server starts one of its own: `ZooKeeperServer(tmp_path, free_port())`.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import subprocess
import tempfile
from pathlib import Path

from cepheid_dev.zookeeper_server import ZooKeeperServer
from tests.support import free_port

_chroots = itertools.count(1)


@functools.cache
def shared_zookeeper() -> ZooKeeperServer:
    """Runs until this process ends."""
    directory = Path(tempfile.mkdtemp(prefix="cepheid-zookeeper-"))
    server = ZooKeeperServer(directory, free_port())
    server.start()
    # A pytest that is killed runs nothing at its end, but its pipes close.
    guard = ["sh", "-c", 'read _; kill -9 "$0"; rm -rf "$1"', str(server.pid), str(directory)]
    pipe = subprocess.Popen(guard, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)

    def end() -> None:
        server.kill()
        assert pipe.stdin is not None
        pipe.stdin.close()
        pipe.wait()

    atexit.register(end)
    return server


def new_chroot() -> str:
    return f"/t{next(_chroots)}"


def new_zookeeper_url() -> str:
    """A chroot that nobody has used yet, on the shared server."""
    return f"zk://{shared_zookeeper().address}{new_chroot()}"
