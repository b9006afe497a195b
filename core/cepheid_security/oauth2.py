"""OAuth2 for clients: fetch a token for a client id and its secret (RFC 6749 §4.4) from an OpenID Connect issuer.

    issuer/.well-known/openid-configuration ─► token_endpoint ─► access token, kept until shortly before it expires

Blocking and thread-safe. The settings are those of Pulsar's own clients, so that their key files work.
"""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from cepheid_ports import CepheidError, Ports
from cepheid_security.issuer_keys import MAX_DOCUMENT_BYTES, IssuerError, check_url, discovery_url, read_object
from cepheid_security.principal import SecurityConfigurationError
from cepheid_security.tls import client_context

if TYPE_CHECKING:
    import urllib.error

_TIMEOUT_S = 10.0
_EARLY_MS = 30_000
"""How long before its expiry a token is replaced: it must still be valid when it reaches the broker."""
_DEFAULT_LIFETIME_S = 300.0  # for an answer without `expires_in`, which is only recommended (RFC 6749 §5.1)
_MAX_LIFETIME_S = 10 * 365 * 86_400.0
_REFUSALS = (400, 401, 403)


class TokenRequestError(CepheidError):
    """The issuer returned no token. The message never contains the secret."""

    retriable = True
    hint = "check the issuer's address, the client id and its secret, and the audience"


class TokenRefusedError(TokenRequestError):
    """The issuer refuses this client a token: a retry would not change that."""

    retriable = False


@dataclass(slots=True)
class ClientCredentials:
    """A function that returns a token: `connect(…, token=ClientCredentials(issuer_url, client_id, client_secret, audience=…))`."""

    issuer_url: str
    client_id: str
    client_secret: str = field(repr=False)
    audience: str | None = None
    """Audience of the token: one that the brokers accept."""
    scope: str | None = None
    ca_file: str | None = None
    """PEM file with the CAs of the issuer's certificate; None: those of the system."""
    wall_ms: Callable[[], int] = field(default_factory=lambda: Ports().wall_ms, repr=False)
    _token: str = field(default="", init=False, repr=False)
    _replace_at_ms: int = field(default=0, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _process_id: int = field(default_factory=os.getpid, init=False, repr=False)  # where `_lock` is used

    def __post_init__(self) -> None:
        """Raises SecurityConfigurationError."""
        check_url(self.issuer_url, "issuer_url")
        if not self.client_id or not self.client_secret:
            raise SecurityConfigurationError("OAuth2 needs client_id and client_secret")

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the token and the lock: another process, such as a Spark task, fetches its own token."""
        fields = (self.issuer_url, self.client_id, self.client_secret, self.audience, self.scope, self.ca_file)
        return ClientCredentials, fields

    @classmethod
    def from_file(cls, path: str | Path, *, audience: str | None = None, scope: str | None = None) -> ClientCredentials:
        """Read a key file as Pulsar's clients use it: JSON with issuer_url, client_id and client_secret.

        It may have audience, scope and ca_file as well; arguments take precedence. Raises SecurityConfigurationError.
        """
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise SecurityConfigurationError(f"the OAuth2 key file {path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise SecurityConfigurationError(f"the OAuth2 key file {path} is not JSON") from None
        names = ("issuer_url", "client_id", "client_secret")
        if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
            raise SecurityConfigurationError(f"the OAuth2 key file {path} must be a JSON object with the texts {', '.join(names)}")
        if found.get("type", "client_credentials") != "client_credentials":
            raise SecurityConfigurationError(f"the OAuth2 key file {path} is not of the type client_credentials")
        return cls(
            issuer_url=found["issuer_url"],
            client_id=found["client_id"],
            client_secret=found["client_secret"],
            audience=audience or found.get("audience"),
            scope=scope or found.get("scope"),
            ca_file=found.get("ca_file"),
        )

    def __call__(self, *, renew: bool = False) -> str:
        """Return a token; with `renew` one that was not returned before. Raises TokenRequestError, SecurityConfigurationError."""
        if self._process_id != os.getpid():  # forked: a thread of the parent may hold the lock, and no thread here would release it
            self._lock, self._process_id = threading.Lock(), os.getpid()
        with self._lock:
            if renew or not self._token or self.wall_ms() >= self._replace_at_ms:
                self._request()
            return self._token

    def _request(self) -> None:
        tls = client_context(ca_file=self.ca_file) if self.issuer_url.startswith("https:") or self.ca_file else None
        asked_at_ms = self.wall_ms()
        endpoint = self._object(_open(discovery_url(self.issuer_url), None, tls)).get("token_endpoint")
        try:
            check_url(str(endpoint), "token_endpoint")  # the secret is sent there
        except SecurityConfigurationError as error:
            raise TokenRequestError(f"{self.issuer_url}: {error}") from None
        form = {"grant_type": "client_credentials", "client_id": self.client_id, "client_secret": self.client_secret}
        form |= {name: value for name, value in (("audience", self.audience), ("scope", self.scope)) if value}
        answer = self._object(_open(str(endpoint), urlencode(form).encode(), tls))
        token, lifetime_s = answer.get("access_token"), answer.get("expires_in", _DEFAULT_LIFETIME_S)
        if not isinstance(token, str) or not token:
            raise TokenRequestError(f"the answer of {endpoint} has no access_token")
        if isinstance(lifetime_s, bool) or not isinstance(lifetime_s, int | float) or not 0 < lifetime_s < _MAX_LIFETIME_S:
            lifetime_s = _DEFAULT_LIFETIME_S
        lifetime_ms = int(lifetime_s * 1000)
        self._token = token
        self._replace_at_ms = asked_at_ms + max(lifetime_ms - _EARLY_MS, lifetime_ms // 2)

    def _object(self, content: bytes) -> dict[str, Any]:
        try:
            return read_object(content)
        except IssuerError as error:
            raise TokenRequestError(f"{self.issuer_url}: {error}") from None


def _open(url: str, body: bytes | None, tls: ssl.SSLContext | None) -> bytes:
    """Return the content at a URL, after a GET, or a POST of `body`. Raises TokenRequestError."""
    import urllib.error  # imported here: few clients use OAuth2, and all import this module
    import urllib.request

    class NoRedirects(urllib.request.HTTPRedirectHandler):
        """Follows no redirects: a secret is sent only to the endpoint in the issuer's configuration."""

        def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
            return None

    opener = urllib.request.build_opener(NoRedirects, *([] if tls is None else [urllib.request.HTTPSHandler(context=tls)]))
    request = urllib.request.Request(url, data=body, headers={"Accept": "application/json"})
    try:
        with opener.open(request, timeout=_TIMEOUT_S) as answer:
            content: bytes = answer.read(MAX_DOCUMENT_BYTES + 1)
    except urllib.error.HTTPError as error:
        # RFC 6749 §5.2 refuses with 400 and 401, a gateway before it with 403. Others, including 404 and 429, may be temporary.
        kind = TokenRefusedError if body is not None and error.code in _REFUSALS else TokenRequestError
        raise kind(f"{url} answers with status {error.code}{_oauth_error(error)}") from None
    except (OSError, ValueError) as error:
        raise TokenRequestError(f"{url} does not answer: {getattr(error, 'reason', None) or error}") from None
    if len(content) > MAX_DOCUMENT_BYTES:
        raise TokenRequestError(f"the answer of {url} has more than {MAX_DOCUMENT_BYTES:,} bytes")
    return content


def _oauth_error(error: urllib.error.HTTPError) -> str:
    """Return the reason of a refusal (RFC 6749 §5.2), such as invalid_client."""
    try:
        found = json.loads(error.read(MAX_DOCUMENT_BYTES))
    except (OSError, ValueError):
        return ""
    reason = found.get("error") if isinstance(found, dict) else None
    return f": {reason[:100]}" if isinstance(reason, str) else ""
