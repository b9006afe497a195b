"""The official Java clients, admin and messages, with each kind of credentials over TLS, set as their configuration sets them.

It needs Java 17, Maven, and access to Maven Central or what Maven has kept of it; otherwise it is skipped.
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
from tests.security.local_issuer import AUDIENCE, LocalIssuer, private_key_url, running_issuer
from tests.support import wait_until

SOURCES = Path(__file__).parent / "java_clients"
IMPLEMENTATIONS = "org.apache.pulsar.client.impl.auth"


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("mvn") is None or shutil.which("java") is None:
        pytest.skip("neither Maven nor Java is installed")
    build = tmp_path_factory.mktemp("java")
    shutil.copy(SOURCES / "pom.xml", build)
    command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=lib"]
    done = subprocess.run(command, cwd=build, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        pytest.skip(f"Maven cannot get the clients: {done.stdout[-300:]}")
    return build / "lib"


def credentials(made: Path, issuer: LocalIssuer) -> dict[str, tuple[str, str]]:
    """The plug-in and its parameters, as `authPlugin` and `authParams` of client.conf have them."""
    oauth2 = {"type": "client_credentials", "issuerUrl": issuer.url, "privateKey": private_key_url(), "audience": AUDIENCE}
    return {
        "token": (f"{IMPLEMENTATIONS}.AuthenticationToken", f"token:{(made / 'admin.token').read_text().strip()}"),
        "basic": (f"{IMPLEMENTATIONS}.AuthenticationBasic", json.dumps({"userId": "ann", "password": "a:secret"})),
        "certificate": (
            f"{IMPLEMENTATIONS}.AuthenticationTls",
            f"tlsCertFile:{made / 'client.pem'},tlsKeyFile:{made / 'client-key.pem'}",
        ),
        "oauth2": (f"{IMPLEMENTATIONS}.oauth2.AuthenticationOAuth2", json.dumps(oauth2)),
        "wrong": (f"{IMPLEMENTATIONS}.AuthenticationToken", "token:x"),
    }


def run(libraries: Path, *arguments: str) -> str:
    command = ["java", "-cp", f"{libraries}/*", str(SOURCES / "AuthenticatedClients.java"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.deadline(600)
@pytest.mark.timeout(700)
async def test_java_clients_authenticate_over_tls(libraries: Path, tmp_path: Path) -> None:
    secure.init(tmp_path)
    (tmp_path / "users").write_text(f"ann:{bcrypt.hashpw(b'a:secret', bcrypt.gensalt(4)).decode()}\n")
    with running_issuer() as issuer:
        settings: dict[str, Any] = tomllib.loads((tmp_path / "server.toml").read_text())
        settings["tls"] |= {"port": 0, "admin_port": 0}
        settings["authentication"] |= {
            "methods": ["token", "basic", "tls", "oidc"],
            "passwords_file": str(tmp_path / "users"),
            "oidc": {"issuers": [issuer.url], "audiences": [AUDIENCE]},
        }
        settings["authorization"]["super_user_roles"] = ["admin", "ann", "client", "app"]
        async with StandaloneCluster(**settings) as cluster:
            serving = cluster.standalone._serving
            await wait_until(lambda: serving.tls_admin_port > 0)
            admin_url = f"https://localhost:{serving.tls_admin_port}"
            where = (cluster.service_url.replace("127.0.0.1", "localhost"), admin_url, str(tmp_path / "ca.pem"))
            for kind, (plugin, parameters) in credentials(tmp_path, issuer).items():
                said = await cluster.blocking(partial(run, libraries, *where, plugin, parameters, kind))
                if kind == "wrong":
                    assert "NotAuthorizedException" in said
                    assert "AuthenticationException" in said
                else:
                    assert said.splitlines()[-2:] == ["listed [public/default]", "received hello"], (kind, said)
