"""Build the server image: `python -m container`, which `make image` runs.

With buildah, podman or docker it builds the Containerfile. Where none of them works (a machine without a registry, CI), it
assembles the same image as an OCI archive: the packages of this Debian, the wheels that pip fetches, and the wheel of this
checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

from container.containerfile import debian_packages, read_last_stage, user_line
from container.debian_root import make_debian_root
from container.oci_archive import Layer, fill_from_folder, fill_from_tar, kept_layer, write_archive, write_layer

SOURCE = Path(__file__).resolve().parents[1]
CACHE = Path(os.environ.get("CEPHEID_IMAGE_CACHE") or Path.home() / ".cache/cepheid-image")
ENGINES = ("buildah", "podman", "docker")
NAME = re.compile(r"(?P<repository>[a-z0-9.:/_-]+[a-z0-9]):(?P<tag>[\w.-]+)")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m container", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="localhost/cepheid:dev", help="repository and tag (default: %(default)s)")
    parser.add_argument(
        "--builder", choices=("auto", *ENGINES, "archive"), default="auto", help="default: the first that works here"
    )
    parser.add_argument(
        "--extras", default="server,tiered", help="extras of the package; add spark for Spark (default: %(default)s)"
    )
    parser.add_argument("--archive", type=Path, help="where the OCI archive is written (default: dist/cepheid-VERSION.oci.tar)")
    options = parser.parse_args(arguments)
    if NAME.fullmatch(options.name) is None:
        sys.exit(f"--name must be REPOSITORY:TAG, got {options.name!r}; without a registry: localhost/cepheid:dev")
    began = time.monotonic()
    builder = working_engine() if options.builder == "auto" else options.builder
    if builder in ENGINES:
        build_with_engine(builder, options.name, options.extras)
        print(f"{options.name} is in the images of {builder}, {time.monotonic() - began:.0f} s")
        return 0
    archive = options.archive or SOURCE / "dist" / f"cepheid-{version()}.oci.tar"
    size_bytes = build_archive(archive, options.name, options.extras)
    print(f"{options.name}: {archive}, {size_bytes / 1e6:.0f} MB compressed, {time.monotonic() - began:.0f} s")
    return 0


def working_engine() -> str:
    """Return the first container engine that answers; "archive" when there is none. A docker client without its daemon is none."""
    for engine in ENGINES:
        if shutil.which(engine) and subprocess.run([engine, "info"], capture_output=True).returncode == 0:
            return engine
    return "archive"


def build_with_engine(engine: str, name: str, extras: str) -> None:
    given = [f"--build-arg={key}={value}" for key, value in {**build_arguments(), "EXTRAS": extras}.items()]
    subprocess.run([engine, "build", f"--tag={name}", "--file=Containerfile", *given, "."], cwd=SOURCE, check=True)


def build_archive(path: Path, name: str, extras: str) -> int:
    """Assemble the image from three layers and return the size of the archive in bytes. The first two are kept for the next run."""
    stage = read_last_stage((SOURCE / "Containerfile").read_text(), {**build_arguments(), "EXTRAS": extras})
    debian = make_debian_root(debian_packages(stage), CACHE, user_line(stage))
    python = python_of(debian)
    user, workdir = int(stage.config["User"].partition(":")[0]), stage.config["WorkingDir"]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        layers = [
            kept_layer(debian.with_suffix(".layer"), fill_from_tar(debian)),
            dependencies_layer(python, extras, root / "dependencies"),
        ]
        run_root_files(python, "cepheid", root / "cepheid")
        layers.append(write_layer(root / "cepheid.layer", fill_from_folder(root / "cepheid", owned={workdir: user})))
        return write_archive(path, name, layers, stage.config)


def dependencies_layer(python: str, extras: str, root: Path) -> Layer:
    """Return the layer of third-party packages: kept while what pyproject.toml requires, and how it is laid out, stay the same."""
    project = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    required = json.dumps([python, project["dependencies"], {name: optional.get(name) for name in ("cluster", *extras.split(","))}])
    key = hashlib.sha256(required.encode() + (SOURCE / "container/root_files.py").read_bytes()).hexdigest()[:12]
    path = CACHE / f"dependencies-{key}.layer"
    if not path.exists():
        run_root_files(python, "dependencies", root, "--extras", extras)
    return kept_layer(path, fill_from_folder(root))


def run_root_files(python: str, part: str, root: Path, *arguments: str) -> None:
    subprocess.run([python, SOURCE / "container/root_files.py", part, "--root", root, *arguments], check=True)


def python_of(debian: Path) -> str:
    """Return the program of the image's Python version on this machine: compiled wheels and bytecode are made for one version."""
    with tarfile.open(debian) as tar:
        versions = [found[1] for name in tar.getnames() if (found := re.fullmatch(r"(?:\./)?usr/bin/(python3\.\d+)", name))]
    if not versions:
        sys.exit(f"{debian} has no Python: delete it, and run this again")
    if f"python{sys.version_info.major}.{sys.version_info.minor}" == versions[0]:
        return sys.executable  # it may have PySpark and a Java, which are then not fetched
    if (found := shutil.which(versions[0])) is None:
        sys.exit(
            f"the image's Python is {versions[0]}, which is not on PATH here: install it with pip (apt-get install python3-pip)"
        )
    return found


def build_arguments() -> dict[str, str]:
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=SOURCE, capture_output=True, text=True).stdout.strip()
    return {"VERSION": version(), "REVISION": revision or "unknown"}


def version() -> str:
    found: str = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["version"]
    return found


if __name__ == "__main__":
    sys.exit(main())
