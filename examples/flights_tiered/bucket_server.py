"""A real S3 server in a separate process: moto, which keeps its objects in memory."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from cepheid_dev.free_ports import free_port
from cepheid_ports import CepheidError

REGION = "us-east-1"
BUCKET = "history"
_START_S = 60.0
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo"}


class BucketServerError(CepheidError):
    """The S3 server is not installed or did not start."""

    hint = "run `pip install 'moto[s3,server]'`, or `make demo-tiered`, which does it"


class BucketServer:
    """The server, started by `start` with an empty bucket. Pass its credentials to processes that are started afterwards."""

    def __init__(self, log_path: Path) -> None:
        if importlib.util.find_spec("moto") is None:
            raise BucketServerError("the package moto is not installed")
        os.environ.update(CREDENTIALS)
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = f"s3://{BUCKET}/cepheid?endpoint={self.endpoint}&region={REGION}"
        with log_path.open("ab") as log:
            command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self._log_path = log_path

    def start(self) -> None:
        """Return when the bucket exists. Raises BucketServerError."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(urllib.request.Request(f"{self.endpoint}/{BUCKET}", method="PUT"), timeout=5).close()
                return
            except OSError as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise BucketServerError(f"the S3 server did not start ({error}): see {self._log_path}") from None
            time.sleep(0.1)

    def pause(self) -> None:
        """Suspend the server, so that an upload in progress stays half done."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
