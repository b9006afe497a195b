"""The admin client on asyncio."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cepheid.admin.async_calls import Resources
from cepheid.admin.connection import AsyncCalls
from cepheid.admin.exchange import DEFAULT_URL, parse_admin_url
from cepheid.credentials import Security
from cepheid.errors import UsageError

if TYPE_CHECKING:
    from cepheid_security.oauth2 import ClientCredentials


class Admin(Resources):
    """The admin calls by subject: `admin.topics`, `admin.namespaces`, …. No connection is kept between calls."""

    def __init__(self, url: str, security: Security, *, request_timeout_s: float) -> None:
        if request_timeout_s <= 0:
            raise UsageError(f"request_timeout_s must be more than 0 seconds, got {request_timeout_s}")
        security.check()
        self._url = url
        self._calls = AsyncCalls(parse_admin_url(url), security, request_timeout_s=request_timeout_s)
        super().__init__(self._calls)

    def __repr__(self) -> str:
        return f"<Admin {self._url}>"

    async def call(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Make a call by its path, for parts of the API that this release does not know. Raises like the other calls."""
        return await self._calls.call(method, path, query, body)

    async def close(self) -> None:
        """Accept no more calls. Those in progress finish normally."""
        self._calls.is_closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def connect(
    url: str = DEFAULT_URL,
    *,
    request_timeout_s: float = 60.0,
    token: str | Path | Callable[[], str] | ClientCredentials | None = None,
    password: tuple[str, str] | None = None,
    tls_ca_file: str | None = None,
    tls_certificate_file: str | None = None,
    tls_key_file: str | None = None,
    tls_check_hostname: bool = True,
    tls_crl: str | None = None,
) -> Admin:
    """Return the admin API at `url`: http://HOST:PORT[,HOST:PORT…] or https://; the first that accepts a connection is used.

    It connects when a call is made. Credentials and TLS are as in `cepheid.connect`. Raises UsageError.
    """
    security = Security(token, password, tls_ca_file, tls_certificate_file, tls_key_file, tls_check_hostname, tls_crl)
    return Admin(url, security, request_timeout_s=request_timeout_s)
