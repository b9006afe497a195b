"""What `pip wheel` makes of a clone, installed where there is no pandas and nothing of the clone: it reads a topic."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of

CLONE = Path(__file__).parents[2]
LEFT_OUT = ("cepheid", "_cepheid", "__editable__", "pandas")  # of the packages that are there

SCAN = """
import importlib.util, sys
from cepheid_scan import scan
assert importlib.util.find_spec("pandas") is None
table = scan("orders", service_url=sys.argv[1], columns=["key", "value", "publish_time"]).read_all()
import cepheid_scan, cepheid_spark.source, pyspark_cepheid
assert cepheid_scan.__file__.startswith(sys.prefix), cepheid_scan.__file__
print(table["value"].to_pylist())
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's `bin`. Nothing is asked of a network: the tools that build are there, and what the package needs."""
    for module in ("hatchling", "pip"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module} to build a wheel with: pip install -e '.[dev]'")
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", directory, CLONE)
    (wheel,) = directory.glob("cepheid-*.whl")
    venv.create(directory / "env", with_pip=False, symlinks=True)
    binaries = directory / "env" / "bin"
    packages = Path(run(binaries / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for there in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(there).iterdir():
            if not entry.name.startswith(LEFT_OUT) and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    run(sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--no-deps", "--no-index", wheel)
    return binaries


def run(*command: str | Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=250, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_it_reads_a_topic(installed: Path) -> None:
    with ProcessCluster() as server:
        with client_of(server.service_url) as client:
            producer = client.create_producer("orders")
            for number in range(3):
                producer.send(b"%d" % number)
        assert run(installed / "python", "-c", SCAN, server.service_url).strip() == "[b'0', b'1', b'2']"
        read = run(installed / "cepheid", "read", "orders", "--columns", "value", "--url", server.service_url)
    assert read.splitlines() == [f'{{"value": "{number}"}}' for number in range(3)]
