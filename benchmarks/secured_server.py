"""Servers under test with TLS, or with tokens and permissions, and what clients show to them."""

from __future__ import annotations

import argparse
import datetime
import time
from pathlib import Path

from benchmarks.raw_client import Shown
from benchmarks.server import Server, free_port
from cepheid_security import client_context, token_keys
from cepheid_security.authority import Authority
from cepheid_security.tokens import create_token

ROLE = "bench"


class ConfiguredServer(Server):
    """With a TOML file of settings."""

    config: Path

    def command(self) -> list[str]:
        return [*super().command(), "--config", str(self.config)]

    def configure(self, text: str) -> None:
        self.config = self.root / "settings.toml"
        self.config.write_text(text)


class TlsServer(ConfiguredServer):
    """With a port of each kind: `url` without TLS, `tls_url` with it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__(arguments)
        authority = Authority(self.root, datetime.datetime.now(datetime.UTC))
        authority.issue("server", hosts=["127.0.0.1"], for_servers=True)
        port = free_port()
        self.tls_url = f"pulsar+ssl://127.0.0.1:{port}"
        self.shown = Shown(tls=client_context(ca_file=str(self.root / "ca.pem")))
        self.configure(
            f'[tls]\ncertificate_file = "{self.root / "server.pem"}"\nkey_file = "{self.root / "server-key.pem"}"\n'
            f"plain_ports = true\nport = {port}\nadmin_port = 0\n"
        )


def token_settings(root: Path, *, super_user: str = "root") -> str:
    """Return settings, as TOML, of a server that asks for tokens and permissions. Its key is put into `root`."""
    key = root / "token.key"
    key.write_bytes(bytes(range(64)))
    return (
        f'[authentication]\nmethods = ["token"]\nsecret_keys = ["{key}"]\n'
        f'[authorization]\nenabled = true\nsuper_user_roles = ["{super_user}"]\n'
    )


def token_of(root: Path, role: str) -> str:
    """Return a token of a role, by the key of `token_settings`."""
    return create_token(token_keys.secret_key(str(root / "token.key")), role, time.time_ns() // 1_000_000)
