"""Which Python would Spark run its workers with? `python3` of the PATH, unless told: not that of an environment nobody activated.

Without this package there, Spark does not know the format: DATA_SOURCE_NOT_FOUND, and no word of the reason.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_NEEDED = "import cepheid_spark, pyarrow, grpc"


def find_fault() -> str | None:
    """What is wrong with it, and what to do; None: it has what a read needs."""
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
