"""The code blocks of README.md and the commands it names, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from cepheid_testkit import ProcessCluster

ROOT = Path(__file__).parents[2]


def test_the_ten_lines_of_the_readme(cluster: ProcessCluster) -> None:
    ours, official = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert re.fullmatch(r"stored at \d+:0:0\nreceived b'hello'\n", output_of(ours, cluster))
    printed = output_of(official, cluster)
    assert re.search(r"^stored at \(\d+,0,-1,-1\)$", printed, flags=re.MULTILINE), printed
    assert "read again: b'hello'" in printed


def output_of(block: str, cluster: ProcessCluster) -> str:
    assert len([line for line in block.splitlines() if line]) <= 10
    code = block.replace("pulsar://127.0.0.1:6650", cluster.service_url)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_produce_and_consume_of_the_command_line(cluster: ProcessCluster) -> None:
    def cepheid(*words: str) -> str:
        command = [sys.executable, "-m", "cepheid_cli", *words, "--url", cluster.service_url]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "COLUMNS": "200"}
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert re.fullmatch(r"\d+:0\n\d+:1\n", cepheid("produce", "cli-topic", "hello", "wörld", "--key", "k"))
    assert re.findall(r"k  (\S+)", cepheid("consume", "cli-topic", "--earliest", "-n", "1")) == ["hello"]
    assert re.findall(r"k  (\S+)", cepheid("consume", "cli-topic", "-n", "1")) == ["wörld"], "the first one is acknowledged"
    long, key = "x" * 500, "[/not markup]"
    cepheid("produce", "cli-topic", long, "--key", key)
    assert f"{key}  {long}\n" in cepheid("consume", "cli-topic", "-n", "1"), "a message is one line, whatever is in it"
