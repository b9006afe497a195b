"""An issuer of OpenID Connect for tests: configuration, keys and tokens over HTTP on 127.0.0.1."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

CLIENT_ID, CLIENT_SECRET = "app", "s3cret-of-the-app"
AUDIENCE = "urn:cepheid"


class LocalIssuer:
    """`with running_issuer() as issuer`. `requests` has the paths that were asked for, `status` is what every path answers with."""

    def __init__(self) -> None:
        self.url = "http://127.0.0.1:1"
        self.requests: list[str] = []
        self.status = 200
        self.lifetime_s = 3600
        self._keys: dict[str, Any] = {}
        self.rotate("first")

    def rotate(self, key_id: str) -> None:
        """Sign with a new key. The one before is withdrawn."""
        self._keys = {key_id: rsa.generate_private_key(65537, 2048)}

    def token(self, *, key_id: str | None = None, algorithm: str = "RS256", key: Any = None, **claims: Any) -> str:
        """Return a token for `app`; a claim that is None is left out."""
        now_s = int(time.time())
        default = {"iss": self.url, "sub": CLIENT_ID, "aud": AUDIENCE, "iat": now_s, "exp": now_s + self.lifetime_s}
        given = {name: value for name, value in {**default, **claims}.items() if value is not None}
        own_id, own = next(iter(self._keys.items()))
        return jwt.encode(given, own if key is None else key, algorithm=algorithm, headers={"kid": key_id or own_id})

    def documents(self) -> dict[str, bytes]:
        """Return what is served, by path."""
        keys = [
            {**json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key())), "kid": key_id, "use": "sig", "alg": "RS256"}
            for key_id, key in self._keys.items()
        ]
        configuration = {"issuer": self.url, "jwks_uri": f"{self.url}/keys", "token_endpoint": f"{self.url}/token"}
        return {
            "/.well-known/openid-configuration": json.dumps(configuration).encode(),
            "/keys": json.dumps({"keys": keys}).encode(),
        }

    def answer(self, path: str, form: dict[str, list[str]]) -> tuple[int, bytes]:
        self.requests.append(path)
        if self.status != 200:
            return self.status, b""
        if path != "/token":
            found = self.documents().get(path)
            return (404, b"") if found is None else (200, found)
        if form.get("client_secret") != [CLIENT_SECRET] or form.get("grant_type") != ["client_credentials"]:
            return 401, b'{"error": "invalid_client"}'
        token = self.token(sub=form["client_id"][0], aud=form.get("audience", [AUDIENCE])[0])
        return 200, json.dumps({"access_token": token, "token_type": "Bearer", "expires_in": self.lifetime_s}).encode()


@contextmanager
def running_issuer() -> Iterator[LocalIssuer]:
    issuer = LocalIssuer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(parse_qs(self.rfile.read(int(self.headers["content-length"])).decode()))

        def _answer(self, form: dict[str, list[str]]) -> None:
            status, content = issuer.answer(self.path, form)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    issuer.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield issuer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def private_key_url() -> str:
    """Return the key file of the client as a data: URL, as Pulsar's clients take it."""
    content = json.dumps({"type": "client_credentials", "client_id": CLIENT_ID, "client_secret": CLIENT_SECRET})
    return f"data:application/json;base64,{base64.b64encode(content.encode()).decode()}"
