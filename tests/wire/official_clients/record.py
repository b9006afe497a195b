"""Record what the official Java and Go clients write, as `entries.json` beside this file.

`python -m tests.wire.official_clients.record` takes Java 17, Maven, Go and access to their package registries. It starts a Cepheid
standalone, lets each client publish to it, and keeps every entry as a bookie has it: `{client: {topic: [entry in base64]}}`.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from cepheid_scan import scan
from cepheid_testkit import ProcessCluster
from tests.wire.official_clients.recorded import CLIENTS, CODECS, ENTRIES_PATH, SHAPES

HERE = Path(__file__).parent


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="recorded-") as name, ProcessCluster() as cluster:
        build = Path(name)
        for source in ("RecordedProducer.java", "recorded_producer.go", "pom.xml", "go.mod"):
            shutil.copy(HERE / source, build)
        _run(build, "mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib")
        _run(build, "java", "-cp", "lib/*", "RecordedProducer.java", cluster.service_url)
        _run(build, "go", "mod", "tidy")
        _run(build, "go", "run", ".", cluster.service_url)
        recorded = {
            client: {f"{codec}-{shape}": _entries(cluster, f"{client}-{codec}-{shape}") for codec in CODECS for shape in SHAPES}
            for client in CLIENTS
        }
    ENTRIES_PATH.write_text(json.dumps(recorded, indent=1) + "\n")


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True)


def _entries(cluster: ProcessCluster, topic: str) -> list[str]:
    rows = scan(topic, service_url=cluster.service_url, mode="entries", columns=["entry"]).read_all()
    return [base64.b64encode(entry).decode() for entry in rows["entry"].to_pylist()]


if __name__ == "__main__":
    main()
