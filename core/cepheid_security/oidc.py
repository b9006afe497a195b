"""Verify tokens of OpenID Connect issuers with keys fetched from the issuer. issuer_keys.py decides when to fetch.

    token ─► which issuer does it claim? ─► keys of that issuer ─► TokenVerifier: signature, issuer, audience, times ─► Principal
                                              ▲
    issuer/.well-known/openid-configuration ─► jwks_uri ─► keys           one fetch at a time for each issuer

Only issuers in the settings are contacted, so that no client can make a broker open connections by sending it a token.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from cepheid_ports import SingleFlight, TaskOwner
from cepheid_security.issuer_keys import (
    MAX_DOCUMENT_BYTES,
    IssuerError,
    IssuerKeys,
    Need,
    check_url,
    discovery_url,
    keys_url,
    read_keys,
)
from cepheid_security.principal import AuthenticationError, AuthenticationUnavailableError, Principal, SecurityConfigurationError
from cepheid_security.settings import OidcSettings
from cepheid_security.tls import client_context
from cepheid_security.tokens import TokenVerifier, claimed_issuer, named_key

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 5.0
"""Limit for fetching both documents of an issuer. Clients wait meanwhile, so it is below the time limit of a CONNECT."""
_MAX_WAITING = 1000
"""Maximum of clients that wait for keys of issuers. Further ones are refused and try again."""
_READ_BYTES = 1 << 14

Fetch = Callable[[str], Awaitable[bytes]]


class OidcVerifier:
    """Checks tokens of the issuers in the settings. `fetch` returns a document by its URL; it raises IssuerError or OSError."""

    def __init__(self, settings: OidcSettings, leeway_s: float, fetch: Fetch | None = None) -> None:
        """Raises SecurityConfigurationError."""
        if not settings.issuers or not settings.audiences:
            raise SecurityConfigurationError(
                "the method oidc needs authentication.oidc.issuers and authentication.oidc.audiences: without an audience, "
                "tokens that the issuer made for other services would be accepted"
            )
        for issuer in settings.issuers:
            check_url(issuer, "an issuer of authentication.oidc.issuers")
        self._settings = settings
        self._leeway_s = leeway_s
        self._fetch = fetch or Fetcher(settings.ca_file)
        self._issuers = {issuer: IssuerKeys(refresh_s=settings.refresh_s, stale_s=settings.stale_s) for issuer in settings.issuers}
        self._fetches: SingleFlight[str, None] = SingleFlight("issuers", lambda: IssuerError("this process stops"))
        self._tasks = TaskOwner("oidc")
        self._refreshing: dict[str, None] = {}
        self._waiting = 0

    def __repr__(self) -> str:
        return f"<OidcVerifier {', '.join(self._issuers)}>"

    def knows(self, token: bytes) -> bool:
        """Return whether the token claims to be from one of the issuers."""
        return claimed_issuer(token) in self._issuers

    def problems(self) -> list[str]:
        """Return sentences for operators about issuers whose keys could not be fetched."""
        return [f"the keys of {issuer} cannot be fetched: {keys.problem}" for issuer, keys in self._issuers.items() if keys.problem]

    async def verify(self, token: bytes, now_ms: int) -> Principal:
        """Return the token's principal. Raises AuthenticationError, also AuthenticationUnavailableError, which is temporary."""
        issuer = claimed_issuer(token)
        keys = None if issuer is None else self._issuers.get(issuer)
        if issuer is None or keys is None:
            raise AuthenticationError("the token is not from an issuer that this cluster accepts")
        need = keys.need(named_key(token), _now_s())
        if need is Need.REFRESH and issuer not in self._refreshing:
            self._refreshing[issuer] = None
            self._tasks.start(self._refresh(issuer), name="refresh-keys").add_done_callback(
                lambda _: self._refreshing.pop(issuer, None)
            )
        elif need is Need.WAIT:
            await self._wait_for_keys(issuer)
        usable = keys.usable(_now_s())
        if not usable or (keys.problem and keys.lacks(named_key(token), _now_s())):  # its key may be new at the issuer
            raise AuthenticationUnavailableError(
                f"tokens of {issuer} cannot be checked at this moment: {keys.problem or 'no keys yet'}"
            )
        return TokenVerifier(
            usable,
            role_claim=self._settings.role_claim,
            audience=self._settings.audiences,
            issuer=issuer,
            leeway_s=self._leeway_s,
            method="oidc",
            must_expire=True,
        ).verify(token, now_ms)

    async def aclose(self) -> None:
        await self._tasks.aclose()
        await self._fetches.aclose()

    async def _wait_for_keys(self, issuer: str) -> None:
        """Wait for the issuer's keys. Raises AuthenticationUnavailableError if too many clients wait."""
        if self._waiting >= _MAX_WAITING:
            raise AuthenticationUnavailableError("too many tokens wait for the keys of their issuer")
        self._waiting += 1
        try:
            await self._refresh(issuer)
        finally:
            self._waiting -= 1

    async def _refresh(self, issuer: str) -> None:
        """Fetch the keys of an issuer. Its `IssuerKeys` records a failure."""
        try:
            await self._fetches.run(issuer, self._fetch_keys)
        except IssuerError:
            pass  # the process stops

    async def _fetch_keys(self, issuer: str) -> None:
        keys = self._issuers[issuer]
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                configuration = await self._fetch(discovery_url(issuer))
                found = read_keys(await self._fetch(keys_url(configuration, issuer)))
        except (IssuerError, OSError) as error:  # TimeoutError is an OSError
            reason = str(error) or f"no answer within {FETCH_TIMEOUT_S:g} s"
            if reason != keys.problem:
                log.warning("issuer.unreachable", extra={"issuer": issuer, "error": reason})
            keys.on_failed(reason, _now_s())
            return
        log.info("issuer.keys_fetched", extra={"issuer": issuer, "keys": len(found)})
        keys.on_fetched(found, _now_s())


class Fetcher:
    """Fetches documents over HTTP: one connection each, of bounded size, without redirects or proxies. Callers limit the time."""

    def __init__(self, ca_file: str | None) -> None:
        """Raises SecurityConfigurationError."""
        self._tls: ssl.SSLContext = client_context(ca_file=ca_file)

    async def __call__(self, url: str) -> bytes:
        """Return the document at a URL. Raises IssuerError, OSError."""
        parts = urlsplit(url)
        tls = self._tls if parts.scheme == "https" else None
        host, target = parts.hostname or "", parts.path or "/"
        if parts.query:
            target = f"{target}?{parts.query}"
        head = [f"GET {target} HTTP/1.1", f"Host: {parts.netloc}", "Accept: application/json", "Connection: close", "", ""]
        reader, writer = await asyncio.open_connection(host, parts.port or (80 if tls is None else 443), ssl=tls)
        try:
            writer.write("\r\n".join(head).encode("ascii", errors="replace"))
            return await _read_answer(reader, url)
        finally:
            writer.transport.abort()  # everything was read, or the rest is not needed


class _Answer:
    """The answer as parsed so far. httptools calls the methods by these names."""

    def __init__(self) -> None:
        self.content = bytearray()
        self.complete = False

    def on_body(self, body: bytes) -> None:
        self.content += body

    def on_message_complete(self) -> None:
        self.complete = True


async def _read_answer(reader: asyncio.StreamReader, url: str) -> bytes:
    """Return the content of an answer. Raises IssuerError."""
    from httptools import HttpParserError, HttpResponseParser

    answer, received = _Answer(), 0
    parser = HttpResponseParser(answer)
    while not answer.complete:
        data = await reader.read(_READ_BYTES)
        received += len(data)
        if received > MAX_DOCUMENT_BYTES:
            raise IssuerError(f"the answer of {url} has more than {MAX_DOCUMENT_BYTES:,} bytes")
        if not data:
            raise IssuerError(f"{url} closed the connection in the middle of its answer")
        try:
            parser.feed_data(data)
        except HttpParserError:
            raise IssuerError(f"what {url} answers is not HTTP") from None
    if (status := parser.get_status_code()) != 200:
        raise IssuerError(f"{url} answers with status {status}")
    return bytes(answer.content)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
