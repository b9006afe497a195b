"""The commands of docs/security.md, run as they stand against `cepheid standalone --secure`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cepheid_security import client_context
from tests.support import free_port

GUIDE = Path(__file__).parents[2] / "docs/security.md"
SERVER = "cepheid standalone --secure DIR"
SAID = {
    # what a command prints, for those that print something to rely on
    "cepheid secure init DIR --host broker.example.org": "server.pem.*admin.token.*client.env",
    "cepheid produce orders hello": r"\d+:0",
    "cepheid topics list public/default": "persistent://public/default/orders",
    "cepheid tokens validate --secret-key DIR/token.key < billing.token": "billing",
    "cepheid tokens validate < billing.token": "billing",
    "cepheid permissions list acme/orders": "billing",
    "cepheid permissions why audit persistent://acme/orders/paid produce": "no|den",
}
EXIT_CODES = {"cepheid permissions why audit persistent://acme/orders/paid produce": 1}


def commands_below(title: str) -> list[str]:
    """The lines of the first block without a language below a title of the guide, without their comments."""
    section = GUIDE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    block = re.search(r"^```\n(cepheid .*?)^```", section, flags=re.DOTALL | re.MULTILINE)
    assert block is not None, title
    return [line.partition("  #")[0].partition(" # ")[0].rstrip() for line in block.group(1).splitlines()]


def run(command: str, directory: Path, environment: Path | None) -> subprocess.CompletedProcess[str]:
    """A command in a shell, after `environment` was sourced."""
    lines = [f'cepheid() {{ {shlex.quote(sys.executable)} -m cepheid_cli "$@"; }}']
    lines += [] if environment is None else [f"source {shlex.quote(str(environment))}"]
    given = {"COLUMNS": "200", "PATH": os.environ["PATH"], "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    return subprocess.run(
        ["bash", "-c", "\n".join([*lines, command])],
        cwd=directory,
        env=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@contextmanager
def served(directory: Path, secured: Path) -> Iterator[None]:
    """The server of the guide, on free ports: those of the guide may be taken here, and client.env names them as well."""
    tls_port, admin_port = free_port(), free_port()
    (directory / "ports.toml").write_text(f"[tls]\nport = {tls_port}\nadmin_port = {admin_port}\n")
    names = secured / "client.env"
    names.write_text(names.read_text().replace(":6651", f":{tls_port}").replace(":8443", f":{admin_port}"))
    command = [sys.executable, "-m", "cepheid_cli", *shlex.split(SERVER.replace("DIR", str(secured)))[1:], "--config", "ports.toml"]
    context = client_context(ca_file=str(secured / "ca.pem"))

    def is_ready() -> bool:
        try:
            with urllib.request.urlopen(f"https://localhost:{admin_port}/ready", context=context, timeout=10) as answer:
                return answer.status == 200
        except OSError:
            return False

    with (directory / "server.log").open("w") as log:
        server = subprocess.Popen(command, cwd=directory, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not is_ready():
            assert server.poll() is None, (directory / "server.log").read_text()
            assert time.monotonic() < deadline, (directory / "server.log").read_text()
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow  # nineteen processes of the command line, one after the other
@pytest.mark.timeout(300)
def test_the_commands_of_the_guide(tmp_path: Path) -> None:
    commands = commands_below("The commands")
    before, after = commands[: commands.index(SERVER)], commands[commands.index(SERVER) + 1 :]
    assert after[0] == "source DIR/client.env"
    assert len(commands) >= 10
    secured = tmp_path / "secured"

    def check(command: str, environment: Path | None = None) -> None:
        done = run(command.replace("DIR", shlex.quote(str(secured))), tmp_path, environment)
        trouble = f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == EXIT_CODES.get(command, 0), trouble
        assert re.search(SAID.get(command, ""), done.stdout, flags=re.DOTALL), trouble

    for command in before:
        check(command)
    with served(tmp_path, secured):
        for command in [*after[1:], *commands_below("Permissions on the admin API")]:
            check(command, secured / "client.env")
    lines = (tmp_path / "data/audit/audit.log").read_text()
    assert '"operation": "PUT /admin/v2/tenants/{tenant}"' in lines
    assert '"result": "denied"' not in lines
