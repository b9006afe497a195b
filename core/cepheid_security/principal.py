"""Who a client is, and what it showed to prove it."""

from __future__ import annotations

from dataclasses import dataclass, field

from cepheid_ports import CepheidError


class AuthenticationError(CepheidError):
    """The credentials of a client do not hold. The text says why, and never contains the credentials."""

    hint = "get new credentials from the administrator of the cluster; `cepheid tokens validate` shows what a token says"


class AuthenticationUnavailableError(AuthenticationError):
    """Whether the credentials hold cannot be told at this moment, and nothing is said against them."""

    retriable = True
    hint = "clients try again by themselves; `/ready` of the broker names an issuer that is away"


class SecurityConfigurationError(CepheidError):
    """A key, certificate or password file that the settings name cannot be used."""


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """What tells one token from another without being the token: revocations name tokens by it."""

    digest: str
    """SHA-256 of what the signature covers (header and claims as sent), in hex. A signature can be written in several ways."""
    token_id: str | None = None
    """The claim `jti`."""
    issued_at_ms: int | None = None
    """The claim `iat`."""


@dataclass(frozen=True, slots=True)
class Principal:
    """A client that was authenticated. `role` is its name in permissions, `method` the setting of `methods` that it passed."""

    role: str
    method: str
    expires_at_ms: int | None = None
    """Wall-clock time from which its credentials hold no longer; None: they do not expire."""
    original_role: str | None = None
    """Role of the client for whom a proxy with `role` speaks; None: it speaks for itself."""
    token: TokenIdentity | None = None
    """The token that it showed; None: it proved itself in another way."""

    @property
    def wire_method(self) -> str:
        """The method as clients of the binary protocol name it: they show tokens of issuers by the method token."""
        return "token" if self.method == "oidc" else self.method


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client shows. `method` as Pulsar names it: token, basic, tls, or none."""

    method: str
    data: bytes = field(default=b"", repr=False)
    certificate_names: tuple[str, ...] = ()
    """Names of the client's TLS certificate, which the TLS layer has verified, by the setting `authentication.certificate_role`."""
    certificate_expires_at_ms: int | None = None
    """When that certificate expires, in ms of the wall clock."""
    peer: str = ""
    """The address that the client connects from."""
