"""Which Java Spark would take: found as Spark finds it, and a missing or unfit one said with the package to install."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cepheid_spark.java_check import NoJavaError, find_java, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_402"', 8),
        ("no such thing", None),
    ],
)
def test_versions_as_java_says_them(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def install(folder: Path, version: str, modules: str) -> Path:
    """A java that only answers what it is asked."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        f"""#!/bin/sh\nif [ "$1" = "-version" ]; then echo 'openjdk version "{version}"' >&2; else echo '{modules}'; fi\n"""
    )
    java.chmod(java.stat().st_mode | stat.S_IEXEC)
    return java


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = install(tmp_path, "21.0.1", "jdk.incubator.vector@21.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert (find_java().path, find_java().version) == (str(java), 21)


@pytest.mark.parametrize(
    ("version", "modules", "why"),
    [("11.0.2", "jdk.incubator.vector@11", "is version 11"), ("21.0.1", "java.base@21.0.1", "no module jdk.incubator.vector")],
)
def test_an_unfit_java_is_named_with_the_package_to_install(
    version: str, modules: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    java = install(tmp_path, version, modules)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(NoJavaError) as caught:
        find_java()
    assert all(part in str(caught.value) for part in (str(java), why, "apt install openjdk-17-jre-headless"))


def test_no_java_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NoJavaError, match="apt install openjdk-17-jre-headless"):
        find_java()


@pytest.mark.slow
def test_what_spark_says_without_java_is_in_the_documentation(tmp_path: Path) -> None:
    """It comes before anything of ours runs."""
    for tool in Path("/usr/bin").iterdir():
        if not tool.name.startswith("java"):
            (tmp_path / tool.name).symlink_to(tool)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}
    program = "from pyspark.sql import SparkSession; SparkSession.builder.master('local[1]').getOrCreate()"
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    page = (Path(__file__).parents[2] / "docs/spark.md").read_text()
    for text in ("JAVA_HOME is not set", "[JAVA_GATEWAY_EXITED] Java gateway process exited"):
        assert text in ran.stderr
        assert text in page
