"""Who a client is, and what it showed to prove it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cepheid_ports import CepheidError


class AuthenticationError(CepheidError):
    """The credentials of a client do not hold. The text says why, and never contains the credentials."""

    hint = "get new credentials from the administrator of the cluster; `cepheid tokens validate` shows what a token says"


class SecurityConfigurationError(CepheidError):
    """A key, certificate or password file that the settings name cannot be used."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A client that was authenticated. `role` is its name in permissions, `method` how it proved it."""

    role: str
    method: str
    expires_at_ms: int | None = None
    """Wall-clock time from which its credentials hold no longer; None: they do not expire."""
    original_role: str | None = None
    """Role of the client for whom a proxy with `role` speaks; None: it speaks for itself."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows. `method` as Pulsar names it: token, basic, tls, or none."""

    method: str
    data: bytes = field(default=b"", repr=False)
    certificate_names: tuple[str, ...] = ()
    """Common name and DNS names of the client's TLS certificate, which the TLS layer has verified."""
