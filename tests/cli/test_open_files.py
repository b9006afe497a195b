"""How many files a role may have open."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import resource
from cepheid_cli.role_process import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 700))
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_a_role_may_open_as_many_as_the_system_lets_it() -> None:
    told = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["700", "700"]
