"""The official Go client with each kind of credentials over TLS, set as its options set them.

It needs Go, and access to a module proxy or what Go has kept of it; otherwise it is skipped.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

import bcrypt
import pytest

from cepheid_cli import secure
from cepheid_testkit import StandaloneCluster
from tests.security.local_issuer import AUDIENCE, CLIENT_ID, CLIENT_SECRET, running_issuer

SOURCES = Path(__file__).parent / "go_client"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("go") is None:
        pytest.skip("Go is not installed")
    built = tmp_path_factory.mktemp("go") / "client"
    for command in (["go", "mod", "download"], ["go", "build", "-o", str(built), "."]):
        done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True, timeout=540, check=False)
        if done.returncode != 0:
            pytest.skip(f"Go cannot build the client: {done.stderr[-300:]}")
    return built


def run(client: Path, *arguments: str) -> str:
    done = subprocess.run([client, *arguments], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.deadline(700)
@pytest.mark.timeout(800)
async def test_the_go_client_authenticates_over_tls(client: Path, tmp_path: Path) -> None:
    secure.init(tmp_path)
    (tmp_path / "users").write_text(f"ann:{bcrypt.hashpw(b'secret', bcrypt.gensalt(4)).decode()}\n")
    (tmp_path / "wrong.token").write_text("x")
    with running_issuer() as issuer:
        key = {"type": "client_credentials", "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET, "issuer_url": issuer.url}
        (tmp_path / "app.json").write_text(json.dumps(key))
        settings: dict[str, Any] = tomllib.loads((tmp_path / "server.toml").read_text())
        settings["tls"] |= {"port": 0, "admin_port": 0}
        settings["authentication"] |= {
            "methods": ["token", "basic", "tls", "oidc"],
            "passwords_file": str(tmp_path / "users"),
            "oidc": {"issuers": [issuer.url], "audiences": [AUDIENCE]},
        }
        settings["authorization"]["super_user_roles"] = ["admin", "ann", "client", CLIENT_ID]
        ways = {
            "token": [str(tmp_path / "admin.token")],
            "basic": ["ann", "secret"],
            "certificate": [str(tmp_path / "client.pem"), str(tmp_path / "client-key.pem")],
            "oauth2": [issuer.url, f"file://{tmp_path}/app.json", AUDIENCE],
        }
        async with StandaloneCluster(**settings) as cluster:
            where = (cluster.service_url.replace("127.0.0.1", "localhost"), str(tmp_path / "ca.pem"))
            for kind, given in ways.items():
                said = await cluster.blocking(partial(run, client, *where, f"persistent://public/default/{kind}", kind, *given))
                assert said == f"received: from go as {kind}"
            for kind, given in {"none": [], "token": [str(tmp_path / "wrong.token")]}.items():
                said = await cluster.blocking(partial(run, client, *where, "persistent://public/default/none", kind, *given))
                assert said.startswith("failed: "), said
