"""How Spark finds the format: a tiny import that never fails, since a failing one takes every Python source from everybody."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKED = ("grpc", "pyarrow", "numpy", "pandas", "google.protobuf", "kazoo", "fastavro")

BLOCKING_IMPORT = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in {BLOCKED!r}):
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
import pyspark_cepheid
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_the_lookup_imports_nothing_heavy() -> None:
    ran = run(BLOCKING_IMPORT + "print(pyspark_cepheid.DefaultSource.name())")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "cepheid\n", "")


def test_the_lookup_survives_a_spark_without_python_sources() -> None:
    ran = run(
        BLOCKING_IMPORT.replace(repr(BLOCKED), repr((*BLOCKED, "pyspark"))) + "print(hasattr(pyspark_cepheid, 'DefaultSource'))"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")


def test_a_spark_without_python_sources_is_named_when_the_source_is_imported() -> None:
    ran = run(BLOCKING_IMPORT.replace(repr(BLOCKED), repr(("pyspark",))) + "import cepheid_spark.source")
    assert ran.returncode == 1
    assert "needs Spark 4.2 or newer" in ran.stderr.splitlines()[-1]


def test_a_spark_that_is_too_old_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    from cepheid_spark import UnsupportedSparkError
    from cepheid_spark.source import CepheidDataSource

    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    with pytest.raises(UnsupportedSparkError, match=r"format 'cepheid' needs Spark 4\.2 or newer; this is Spark 4\.1\.4"):
        CepheidDataSource({}).schema()


@pytest.mark.parametrize(
    ("version", "enough"),
    [("4.2.0", True), ("4.3.0.dev1", True), ("5.0", True), ("4.10.1", True), ("4.1.4", False), ("3.5.1", False)],
)
def test_versions(version: str, enough: bool) -> None:
    from cepheid_spark.versions import is_enough

    assert is_enough(version) is enough
