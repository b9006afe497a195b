"""The identity of a client, and the credentials that prove it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cepheid_ports import CepheidError


class AuthenticationError(CepheidError):
    """The credentials of a client are not valid. The message says why, and never contains the credentials."""

    hint = "get new credentials from the administrator of the cluster; `cepheid tokens validate` shows what a token says"


class AuthenticationUnavailableError(AuthenticationError):
    """The credentials cannot be checked at the moment; they may be valid."""

    retriable = True
    hint = "clients try again by themselves; `/ready` of the broker names an issuer that is away"


class SecurityConfigurationError(CepheidError):
    """A key, certificate or password file in the settings cannot be used."""


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """Identifies a token without containing it. Revocations name tokens by it."""

    digest: str
    """SHA-256, in hex, of the signed part (header and claims as sent), since one signature can be encoded in several ways."""
    token_id: str | None = None
    """The claim `jti`."""
    issued_at_ms: int | None = None
    """The claim `iat`."""


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated client. `role` is its name in permissions, `method` the one of `methods` by which it authenticated."""

    role: str
    method: str
    expires_at_ms: int | None = None
    """Wall-clock time at which its credentials expire; None: never."""
    original_role: str | None = None
    """Role of the client for which a proxy with `role` acts; None: it acts for itself."""
    token: TokenIdentity | None = None
    """The token it authenticated with; None: it used another method."""

    @property
    def wire_method(self) -> str:
        """The method's name in the binary protocol, where tokens of issuers use the method token."""
        return "token" if self.method == "oidc" else self.method


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a client sends. `method` is Pulsar's name: token, basic, tls, or none."""

    method: str
    data: bytes = field(default=b"", repr=False)
    certificate_names: tuple[str, ...] = ()
    """Names in the client's verified TLS certificate, by the setting `authentication.certificate_role`."""
    certificate_expires_at_ms: int | None = None
    """When that certificate expires, in ms of the wall clock."""
    peer: str = ""
    """The address that the client connects from."""
