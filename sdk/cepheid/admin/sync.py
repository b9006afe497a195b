"""The admin API without asyncio: the calls of `cepheid.admin`, blocking, on the standard library's HTTP.

with cepheid.admin.sync.connect("http://localhost:8080") as admin:
    admin.topics.create("orders")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cepheid.admin.blocking_calls import Resources
from cepheid.admin.blocking_connection import BlockingCalls
from cepheid.admin.exchange import DEFAULT_URL, parse_admin_url
from cepheid.credentials import Security
from cepheid.errors import UsageError

if TYPE_CHECKING:
    from cepheid_security.oauth2 import ClientCredentials

__all__ = ["Admin", "connect"]


class Admin(Resources):
    """See `cepheid.admin.Admin`. May be used by several threads."""

    def __init__(self, url: str, security: Security, *, request_timeout_s: float) -> None:
        if request_timeout_s <= 0:
            raise UsageError(f"request_timeout_s must be more than 0 seconds, got {request_timeout_s}")
        security.check()
        self.url = url
        self._calls = BlockingCalls(parse_admin_url(url), security, request_timeout_s=request_timeout_s)
        super().__init__(self._calls)

    def __repr__(self) -> str:
        return f"<Admin {self.url}>"

    def call(self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Any:
        """Make a call by its path, for parts of the API that this release does not know. Raises like the other calls."""
        return self._calls.call(method, path, query, body)

    def close(self) -> None:
        """Accept no more calls."""
        self._calls.is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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
    """Return the admin API at `url`, for blocking calls; arguments as in `cepheid.admin.connect`. Raises UsageError.

    `request_timeout_s` limits connecting, and each wait for bytes from the broker.
    """
    security = Security(token, password, tls_ca_file, tls_certificate_file, tls_key_file, tls_check_hostname, tls_crl)
    return Admin(url, security, request_timeout_s=request_timeout_s)
