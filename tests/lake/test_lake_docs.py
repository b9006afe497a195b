"""docs/lake.md, run as it stands: its blocks in one session, with the page's folder in a temporary one."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_testkit import ProcessCluster

PAGE = (Path(__file__).parents[2] / "docs/lake.md").read_text()


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"```(python|console)\n(.*?)```", PAGE, flags=re.DOTALL)
    with ProcessCluster() as server:
        for language, block in blocks:
            text = block.replace("pulsar://127.0.0.1:6650", server.service_url).replace("/tmp/lake", str(tmp_path))
            if language == "python":
                exec(compile(text, "docs/lake.md", "exec"), names)
                continue
            for command, shown in re.findall(r"^\$ cepheid (.*)\n((?:[^$].*\n?)*)", text, flags=re.MULTILINE):
                result = CliRunner().invoke(app, [*shlex.split(command), "--url", server.service_url])
                assert result.exit_code == 0, result.output
                assert result.output == shown
    assert len(blocks) == 4
