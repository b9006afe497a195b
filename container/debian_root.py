"""A minimal Debian with Python as a tar, made of the packages that this machine is set up to fetch: the base of the image."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

APT_SOURCES = (Path("/etc/apt/sources.list"), Path("/etc/apt/sources.list.d/debian.sources"))
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/info/*", "/usr/share/locale/*")


def debian_release() -> str:
    """Return the code name of the Debian that runs here, such as "bookworm"."""
    found = re.search(r"^VERSION_CODENAME=(\w+)", Path("/etc/os-release").read_text(), re.MULTILINE)
    if found is None or not any(path.exists() for path in APT_SOURCES):
        sys.exit("an image without a container engine is made on Debian only: install buildah, podman or docker here")
    return found[1]


def make_debian_root(packages: list[str], cache: Path, user_line: str = "") -> Path:
    """Return a tar with these packages and what they need. It is made once for each release and list of packages.

    `user_line` is added to /etc/passwd.
    """
    release = debian_release()
    key = hashlib.sha256(" ".join([release, *packages, *LEFT_OUT, *([user_line] if user_line else [])]).encode()).hexdigest()[:12]
    archive = cache / f"debian-{release}-{key}.tar"
    if archive.exists():
        return archive
    if shutil.which("mmdebstrap") is None:
        sys.exit("mmdebstrap is missing: apt-get install mmdebstrap")
    cache.mkdir(parents=True, exist_ok=True)
    part = archive.with_suffix(".part.tar")
    sources = [str(path) for path in APT_SOURCES if path.exists()]
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    # "essential": without apt, which an image that is never changed has no use for. The fixed time makes the tar reproducible.
    command = ["mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(packages)}", "--components=main"]
    # Java's package links its manual pages, and fails to install without their folder, which LEFT_OUT leaves out.
    man = ['--essential-hook=mkdir -p "$1/usr/share/man/man1"'] if any("-jre-" in package for package in packages) else []
    added = [*man, *([f'--customize-hook=echo "{user_line}" >> "$1/etc/passwd"'] if user_line else [])]
    subprocess.run(
        [*command, *excluded, *added, release, str(part), *sources],
        check=True,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1700000000"},
    )
    part.rename(archive)
    return archive
