"""An environment with the wheel that `pip wheel` makes of a clone, and nothing of the clone, and no pandas: for tests.

Nothing is asked of a network: the tools that build are there, and what the package needs is linked from where the tests have it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

CLONE = Path(__file__).parents[1]
LEFT_OUT = ("cepheid", "_cepheid", "__editable__", "pandas")  # of the packages that are there


def install_wheel(directory: Path) -> Path:
    """The environment's `bin`, in `directory`."""
    for module in ("hatchling", "pip"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"no {module} to build a wheel with: pip install -e '.[dev]'")
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
    """What it prints. Nothing of the clone is in its way: neither by its directory nor by its environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", timeout=250, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
