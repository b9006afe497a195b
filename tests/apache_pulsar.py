"""A standalone Apache Pulsar in a process of its own: for tests of the client against it, and to compare it with Cepheid.

    make pulsar                                      # once: its archive, by its Maven coordinate, into the cache folder
    with ApachePulsar(installed_home()) as pulsar:   # free ports, an empty data folder, removed at the end
        cepheid.connect(pulsar.url)

CEPHEID_PULSAR_HOME in the environment names the folder of a Pulsar that was unpacked elsewhere. CEPHEID_PULSAR_CACHE names another
cache folder than ~/.cache/cepheid-pulsar.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cepheid_dev.free_ports import free_port

VERSION = "4.0.8"  # of later ones there is no archive with a Maven coordinate
COORDINATE = f"org.apache.pulsar:pulsar-server-distribution:{VERSION}:tar.gz:bin"
HOME_VARIABLE = "CEPHEID_PULSAR_HOME"
CACHE = Path(os.environ.get("CEPHEID_PULSAR_CACHE") or Path.home() / ".cache/cepheid-pulsar").absolute()
MEMORY = "-Xms512m -Xmx512m -XX:MaxDirectMemorySize=512m"
COLLECTOR = "-XX:+UseG1GC -XX:+PerfDisableSharedMem"
"""Those of bin/pulsar would take 2 GB at once (AlwaysPreTouch), and count three times in RSS (ZGC)."""
START_LIMIT_S = 120.0
POLL_S = 0.1
LOG_TAIL_CHARS = 4_000


class NotInstalledError(Exception):
    """There is no Apache Pulsar on this machine, or nothing that can run it. The text says what to do."""


def installed_home() -> Path:
    """Return the folder of the distribution: that of CEPHEID_PULSAR_HOME, or what `install` made. Raises NotInstalledError."""
    if given := os.environ.get(HOME_VARIABLE):
        home, remedy = Path(given), f"{HOME_VARIABLE} must name the folder of an Apache Pulsar"
    else:
        home, remedy = CACHE / f"apache-pulsar-{VERSION}", f"run `make pulsar`, or set {HOME_VARIABLE}"
    if not (home / "bin" / "pulsar").is_file():
        raise NotInstalledError(f"Apache Pulsar is not installed in {home}: {remedy}")
    if not os.environ.get("JAVA_HOME") and shutil.which("java") is None:
        raise NotInstalledError("Apache Pulsar needs Java 17 or newer, and there is no Java")
    return home


def install() -> Path:
    """Fetch the archive with Maven, unless it is installed, and return its folder. Raises NotInstalledError."""
    home = CACHE / f"apache-pulsar-{VERSION}"
    if home.is_dir():
        return home
    if shutil.which("mvn") is None:
        raise NotInstalledError("Maven is not installed: it fetches the archive")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:  # renamed when it is complete
        # By pinned versions of the plug-in: without a project Maven takes an old one that knows no classifiers.
        plugin = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
        for goal in (f"get -Dartifact={COORDINATE} -Dtransitive=false", f"copy -Dartifact={COORDINATE} -DoutputDirectory={name}"):
            first, *options = goal.split(" ")
            done = subprocess.run(["mvn", "-q", "-B", f"{plugin}:{first}", *options], cwd=name, check=False)
            if done.returncode != 0:
                raise NotInstalledError(f"Maven could not fetch {COORDINATE}")
        (archive,) = Path(name).glob("*.tar.gz")
        with tarfile.open(archive) as opened:
            opened.extractall(name, filter="data")
        (Path(name) / home.name).rename(home)
    return home


class ApachePulsar:
    """One broker and one bookie on free ports of 127.0.0.1, without functions and stream storage.

    The shipped settings acknowledge before the journal is on disk. Here `is_synced` says whether they wait, as Cepheid does.
    `settings` replace those of standalone.conf.
    """

    def __init__(self, home: Path, *, is_synced: bool = True, memory: str = MEMORY, settings: dict[str, Any] | None = None) -> None:
        self._home = home
        self._memory = memory
        self._folder = tempfile.TemporaryDirectory(prefix="apache-pulsar-")
        self.port, self._admin_port, self._bookie_port = (free_port() for _ in range(3))
        self._settings = {
            "brokerServicePort": self.port,
            "webServicePort": self._admin_port,
            "bindAddress": "127.0.0.1",
            "advertisedAddress": "127.0.0.1",
            "journalSyncData": str(is_synced).lower(),
            "loadBalancerEnabled": "false",
            "allowLoopback": "true",
            "narExtractionDirectory": self._folder.name,
            **(settings or {}),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def __repr__(self) -> str:
        return f"<ApachePulsar {self.url}, data in {self._folder.name}>"

    @property
    def url(self) -> str:
        return f"pulsar://127.0.0.1:{self.port}"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self._admin_port}"

    @property
    def log_text(self) -> str:
        path = Path(self._folder.name) / "output"
        return path.read_text(errors="replace") if path.exists() else ""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()
        self._folder.cleanup()

    def start(self, timeout_s: float = START_LIMIT_S) -> None:
        """Return when `public/default` serves. After `kill`, the same data and ports."""
        folder = Path(self._folder.name)
        config = folder / "standalone.conf"
        config.write_text(_with_settings((self._home / "conf" / "standalone.conf").read_text(), self._settings))
        command = [str(self._home / "bin" / "pulsar"), "standalone", "-nfw", "-nss", "-a", "127.0.0.1"]
        command += ["--bookkeeper-port", str(self._bookie_port), "--bookkeeper-dir", str(folder / "bookkeeper")]
        command += ["--metadata-dir", str(folder / "metadata")]
        environment = {
            **os.environ,
            "PULSAR_STANDALONE_CONF": str(config),
            "PULSAR_MEM": self._memory,
            "PULSAR_GC": COLLECTOR,
            "PULSAR_GC_LOG": "-Xlog:disable",
            "PULSAR_LOG_DIR": str(folder / "logs"),
            "PULSAR_LOG_LEVEL": "warn",
        }
        with (folder / "output").open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=folder)
        deadline = time.monotonic() + timeout_s
        while not self._serves():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"Apache Pulsar did not start within {timeout_s} s:\n{self.log_text[-LOG_TAIL_CHARS:]}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """SIGKILL: its own shutdown takes many seconds, and its data are on disk or removed."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def _serves(self) -> bool:
        """Return whether topics can be opened: the namespace is made last, and its first bundle is assigned after that."""
        url = f"{self.admin_url}/lookup/v2/topic/persistent/public/default/ready"
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return "brokerUrl" in json.loads(answer.read())
        except (OSError, urllib.error.URLError, ValueError):
            return False


def _with_settings(text: str, settings: dict[str, Any]) -> str:
    """Return the text of a properties file in which the settings have these values."""
    kept = [line for line in text.splitlines() if line.partition("=")[0].strip() not in settings]
    return "\n".join([*kept, *(f"{name}={value}" for name, value in settings.items()), ""])


if __name__ == "__main__":
    try:
        print(f"Apache Pulsar {VERSION} is in {install()}")
    except NotInstalledError as error:
        sys.exit(str(error))
