"""A real S3 server (moto) in a process of its own, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest

BUCKET = "segments"
_XML = {"content-type": "application/xml"}
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key-of-a-test", "AWS_SECRET_ACCESS_KEY": "secret-of-a-test"}
_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass(frozen=True, slots=True)
class S3Server:
    endpoint: str

    def url(self, path: str, bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{path}?endpoint={self.endpoint}&region=us-east-1"

    def unfinished_uploads(self) -> int:
        with urllib.request.urlopen(f"{self.endpoint}/{BUCKET}?uploads") as answer:
            return bytes(answer.read()).count(b"<UploadId>")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Started with the bucket, and ended with the block. Skips the test where moto is not installed."""
    if find_spec("moto") is None:
        pytest.skip("moto is not installed: pip install 'moto[server]'")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, "-c", _SERVER], **pipes)
    try:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        request = urllib.request.Request(
            f"{endpoint}/{BUCKET}", data=b"", method="PUT", headers={"content-type": "application/xml"}
        )
        urllib.request.urlopen(request).close()
        yield S3Server(endpoint)
    finally:
        server.kill()
        server.communicate()


@contextmanager
def credentials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield
