"""Run `cepheid secure init` and store what it made in Secrets of this namespace. What exists is left as it is.

    create_secrets.py --namespace NAME --server SECRET --client SECRET --authority SECRET --host NAME …

    SERVER      for brokers: certificate and key, CA, token key, the brokers' own token
    CLIENT      for operators and tests: CA, token of the role admin, a client certificate
    AUTHORITY   the key of the CA, which no pod gets

Nothing of it is printed. It uses the account of its pod, which may create Secrets and read these three.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
AUTHORITY = ("ca.pem", "ca-key.pem")
SERVER = ("ca.pem", "server.pem", "server-key.pem", "token.key", "broker.token")
CLIENT = ("ca.pem", "client.pem", "client-key.pem", "admin.token")
NOT_FOUND, CONFLICT = 404, 409


class Kubernetes:
    """The Secrets of one namespace."""

    def __init__(self, url: str, namespace: str, token: str, context: ssl.SSLContext | None) -> None:
        self._base = f"{url}/api/v1/namespaces/{namespace}/secrets"
        self._token = token
        self._context = context

    def read(self, name: str) -> dict[str, bytes] | None:
        """Return a Secret's files, None if there is no such Secret."""
        try:
            found = self._call("GET", f"/{name}")
        except urllib.error.HTTPError as error:
            if error.code == NOT_FOUND:
                return None
            raise
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    def create(self, name: str, files: dict[str, bytes]) -> bool:
        """Create a Secret; return False if another process was quicker."""
        data = {key: base64.b64encode(value).decode() for key, value in files.items()}
        body = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "type": "Opaque", "data": data}
        try:
            self._call("POST", "", body)
        except urllib.error.HTTPError as error:
            if error.code == CONFLICT:
                return False
            raise
        return True

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(self._base + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=30, context=self._context) as answer:
            return json.load(answer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("namespace", "server", "client", "authority"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--host", action="append", default=[], help="name under which brokers are reached")
    options = parser.parse_args()
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    token, context = (ACCOUNT / "token").read_text(), ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    address = f"[{host}]" if ":" in host else host
    cluster = Kubernetes(f"https://{address}:{port}", options.namespace, token, context)
    try:
        for line in ensure(cluster, options.authority, options.server, options.client, options.host):
            print(line)
    except urllib.error.HTTPError as error:
        reason = json.loads(error.read() or b"{}").get("message", error.reason)
        sys.exit(f"Kubernetes refused: {reason}")


def ensure(cluster: Kubernetes, authority: str, server: str, client: str, hosts: list[str]) -> list[str]:
    """Create the Secrets that are missing and return a line about each."""
    wanted = {authority: AUTHORITY, server: SERVER, client: CLIENT}
    found = {name: cluster.read(name) for name in wanted}
    if all(files is not None for name, files in found.items() if name != authority):
        return [f"{server} and {client} exist, and are kept"]
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "secure")
        directory.mkdir(mode=0o700)
        for name, files in found.items():  # made once, signed by the same CA ever after
            for key in wanted[name] if files is not None else ():
                if key in (files or {}):
                    (directory / key).write_bytes((files or {})[key])
        if (directory / "ca.pem").exists() and not (directory / "ca-key.pem").exists():
            existing = ", ".join(name for name, files in found.items() if files is not None)
            sys.exit(
                f"{existing} exists, but {authority} with the key of its CA does not: restore {authority}, or delete {existing}"
            )
        command = ["cepheid", "secure", "init", str(directory), *(f"--host={host}" for host in hosts)]
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            sys.exit(f"cepheid secure init failed: {made.stderr.strip()}")
        lines = []
        for name, keys in wanted.items():
            if found[name] is None:
                created = cluster.create(name, {key: (directory / key).read_bytes() for key in keys})
                lines.append(f"{name} is created" if created else f"{name} was created by another process")
        return lines


if __name__ == "__main__":
    main()
