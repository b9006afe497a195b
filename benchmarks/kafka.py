"""Apache Kafka, one node in a process of its own, to compare it with Cepheid.

    make kafka                                      # once: its jars, by their Maven coordinates, into the cache folder
    with ApacheKafka(installed_jars()) as kafka:    # free ports, an empty data folder, removed at the end
        kafka.url

CEPHEID_KAFKA_HOME in the environment names the folder of a Kafka that was unpacked elsewhere. The shipped settings acknowledge what
is in the page cache. Here every append is synced first (`log.flush.interval.messages=1`), as it is with Cepheid.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.server import free_port, is_listening
from tests.apache_pulsar import NotInstalledError

VERSION = "4.3.1"
HOME_VARIABLE = "CEPHEID_KAFKA_HOME"
CACHE = Path.home() / ".cache/cepheid-kafka"
START_LIMIT_S = 60.0
POLL_S = 0.05
CLUSTER_ID = "MkU3OEVBNTcwNTJENDM2Qk"  # any 16 bytes in base64
RECORD_BYTES = 1000
_PROJECT = f"""<project><modelVersion>4.0.0</modelVersion><groupId>cepheid</groupId><artifactId>kafka</artifactId>
<version>1</version><packaging>pom</packaging><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>{VERSION}</version></dependency>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka-tools</artifactId><version>{VERSION}</version></dependency>
</dependencies></project>"""
_SETTINGS = """process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
controller.listener.names=CONTROLLER
log.dirs={folder}/data
log.flush.interval.messages=1
offsets.topic.replication.factor=1
"""
_PERF_RESULT = re.compile(r"records sent, ([\d.]+) records/sec .* ([\d.]+) ms 50th, .* ([\d.]+) ms 99th, ([\d.]+) ms 99.9th")


def installed_jars() -> Path:
    """Return the folder of the jars: that of CEPHEID_KAFKA_HOME, or what `install` made. Raises NotInstalledError."""
    given = os.environ.get(HOME_VARIABLE)
    jars = Path(given) / "libs" if given else CACHE / VERSION
    if not any(jars.glob("kafka_*.jar")):
        raise NotInstalledError(f"Apache Kafka is not installed in {jars}: run `make kafka`, or set {HOME_VARIABLE}")
    if shutil.which("java") is None:
        raise NotInstalledError("Apache Kafka needs Java 17 or newer, and there is no Java")
    return jars


def install() -> Path:
    """Fetch the jars with Maven, unless they are installed, and return their folder. Raises NotInstalledError."""
    jars = CACHE / VERSION
    if jars.is_dir():
        return jars
    if shutil.which("mvn") is None:
        raise NotInstalledError("Maven is not installed: it fetches the jars")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:  # renamed when it is complete
        (Path(name) / "pom.xml").write_text(_PROJECT)
        goal = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
        command = ["mvn", "-q", "-B", goal, "-DincludeScope=runtime", f"-DoutputDirectory={name}/jars"]
        if subprocess.run(command, cwd=name, check=False).returncode != 0:
            raise NotInstalledError(f"Maven could not fetch Apache Kafka {VERSION}")
        (Path(name) / "jars").rename(jars)
    return jars


class ApacheKafka:
    """One process that is broker and controller. Topics are created by their first use, with one partition."""

    def __init__(self, jars: Path) -> None:
        self._jars = jars
        self._folder = tempfile.TemporaryDirectory(prefix="apache-kafka-")
        self._port, self._controller_port = free_port(), free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        folder = Path(self._folder.name)
        settings = folder / "server.properties"
        settings.write_text(_SETTINGS.format(port=self._port, controller_port=self._controller_port, folder=folder))
        formatting = ["kafka.tools.StorageTool", "format", "-t", CLUSTER_ID, "-c", str(settings)]
        subprocess.run(["java", "-cp", f"{self._jars}/*", *formatting], capture_output=True, check=True)
        server = ["java", "-Xms1g", "-Xmx1g", "-cp", f"{self._jars}/*", "kafka.Kafka", str(settings)]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(server, stdout=output, stderr=output)
        deadline = time.monotonic() + START_LIMIT_S
        while not is_listening("127.0.0.1", self._port):
            if self.process.poll() is not None or time.monotonic() > deadline:
                text = (folder / "output").read_text(errors="replace")[-4000:]
                self.__exit__(None, None, None)
                raise RuntimeError(f"Apache Kafka did not start within {START_LIMIT_S} s:\n{text}")
            time.sleep(POLL_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()


def producer_perf(jars: Path, *, records: int, rate_per_s: int = -1) -> Callable[[str], dict[str, float]]:
    """Return a load of Kafka's own generator at a server: records of 1 KB, batched as its client does by default.

    A fifth of the records are to warm up. `rate_per_s`: -1 is as fast as possible. Raises RuntimeError when it fails.
    """

    def run(url: str) -> dict[str, float]:
        command = ["java", "-Xmx512m", "-cp", f"{jars}/*", "org.apache.kafka.tools.ProducerPerformance"]
        command += ["--topic", f"perf-{time.monotonic_ns()}", "--record-size", str(RECORD_BYTES), "--throughput", str(rate_per_s)]
        command += ["--num-records", str(records), "--warmup-records", str(records // 5)]
        command += ["--command-property", f"bootstrap.servers={url}", "acks=all"]
        finished = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        found = _PERF_RESULT.findall(finished.stdout)
        if finished.returncode or not found:
            raise RuntimeError(f"Kafka's ProducerPerformance failed:\n{finished.stdout[-2000:]}")
        rate, p50, p99, p999 = map(float, found[-1])
        return {"messages_per_s": rate, "latency_ms_p50": p50, "latency_ms_p99": p99, "latency_ms_p999": p999}

    return run


if __name__ == "__main__":
    try:
        print(f"Apache Kafka {VERSION} is in {install()}")
    except NotInstalledError as error:
        sys.exit(str(error))
