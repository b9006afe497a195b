"""The source of the previous release, taken from the git history, and processes that run it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[2]


class OldCode:
    """An unpacked source tree. Processes that are started inside `with old.in_use():` run this code."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        project = tomllib.loads((root / "pyproject.toml").read_text())
        packages = [Path(package) for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
        self._packages = [package.name for package in packages]
        self._folders = list(dict.fromkeys(self._root / package.parent for package in packages))

    @classmethod
    def from_history(cls, commit: str, root: Path) -> OldCode:
        """Unpack the tree of `commit` into `root`. Skips the test when the clone does not have that commit."""
        try:
            archived = subprocess.run(["git", "-C", str(CLONE), "archive", commit], capture_output=True)
        except FileNotFoundError:
            pytest.skip("git is not installed: the source of the previous release cannot be taken from the history")
        if archived.returncode != 0:
            reason = archived.stderr.decode(errors="replace").strip()
            pytest.skip(f"this clone has no commit {commit[:12]}, the previous release (git fetch --unshallow): {reason}")
        with tarfile.open(fileobj=BytesIO(archived.stdout)) as tar:
            # Python 3.11.3 and older have no filters. The archive is of this very repository.
            tar.extractall(root, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
        return cls(root)

    def __repr__(self) -> str:
        return f"<OldCode in {self._root}>"

    @property
    def _python_path(self) -> str:
        return os.pathsep.join(map(str, self._folders))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = self._python_path
        try:
            yield
        finally:
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before

    def is_run_by(self, pid: int) -> bool:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return f"PYTHONPATH={self._python_path}".encode() in variables

    def places_of_packages(self) -> dict[str, bool]:
        """Return for each package whether a process that runs the previous release imports it from the unpacked tree."""
        question = (
            "import importlib.util, sys\n"
            "for name in sys.argv[1:]:\n"
            "    print(name, importlib.util.find_spec(name).submodule_search_locations[0])\n"
        )
        with self.in_use():
            answer = subprocess.run([sys.executable, "-c", question, *self._packages], capture_output=True, text=True, check=True)
        places = (line.partition(" ") for line in answer.stdout.splitlines())
        return {name: self._root in Path(place).parents for name, _, place in places}
