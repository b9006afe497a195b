"""Settings of TLS and of authentication: of every process that clients connect to."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from cepheid_security.tls import ClientTls


class TlsSettings(BaseModel, frozen=True, extra="forbid"):
    """Encrypted ports beside the plain ones, or in their place."""

    certificate_file: str | None = Field(
        None,
        description="PEM file with the server's certificate and the CAs between it and the root. Setting it opens the TLS ports.",
    )
    key_file: str | None = Field(None, description="PEM file with the certificate's private key, without a password.")
    port: NonNegativeInt = Field(6651, le=65535, description="Port of the binary protocol over TLS. 0: any free port.")
    admin_port: NonNegativeInt = Field(8443, le=65535, description="Port of the admin API over TLS. 0: any free port.")
    plain_ports: bool = Field(
        False, description="Whether the ports without TLS stay open as well, while clients are moved to the encrypted ones."
    )
    ca_file: str | None = Field(
        None, description="PEM file with the CAs that signed the certificates of the other brokers. Unset: the CAs of the system."
    )
    client_ca_file: str | None = Field(None, description="PEM file with the CAs that sign certificates of clients.")
    client_certificates: Literal["none", "optional", "required"] = Field(
        "none", description="Whether clients are asked for a certificate. A certificate is what the method `tls` authenticates by."
    )
    minimum_version: Literal["1.2", "1.3"] = Field("1.2", description="Oldest version of TLS that is spoken.")
    reload_s: PositiveFloat = Field(
        10.0, description="Interval between looks for new certificate files. They are used for new connections, without a restart."
    )

    @property
    def enabled(self) -> bool:
        return self.certificate_file is not None

    @property
    def own_tls(self) -> ClientTls | None:
        """What this process shows to the bookies of its cluster; None without TLS."""
        return ClientTls(self.ca_file, self.certificate_file, self.key_file) if self.enabled else None


class AuthenticationSettings(BaseModel, frozen=True, extra="forbid"):
    """Who may connect. Without a method everybody may; with one, nobody without credentials."""

    methods: tuple[Literal["token", "basic", "tls"], ...] = Field(
        (), description="How clients may prove who they are: a token, a user name with a password, or a TLS certificate."
    )
    secret_keys: tuple[str, ...] = Field(
        (),
        repr=False,
        description="Secret keys of tokens: path, `file:` or `data:;base64,` URL; `NAME=path` for tokens that name their key. "
        "Several while a key is exchanged.",
    )
    public_keys: tuple[str, ...] = Field(
        (), description="Public keys (RSA or EC) of tokens that are signed elsewhere, named alike."
    )
    role_claim: str = Field("sub", min_length=1, description="Claim of a token that is the role.")
    audience: str | None = Field(None, description="Audience that a token must be for. Unset: it is not looked at.")
    issuer: str | None = Field(None, description="Issuer that a token must be from. Unset: it is not looked at.")
    clock_leeway_s: NonNegativeFloat = Field(5.0, description="How far the clocks of this machine and of the issuer may be apart.")
    passwords_file: str | None = Field(None, description="File of `htpasswd -B` with the users of the method `basic`.")
    anonymous_role: str | None = Field(
        None, min_length=1, description="Role of clients that show no credentials. Unset: they are refused."
    )
    own_token_file: str | None = Field(
        None, description="File with the token that this broker shows to the other brokers of its cluster."
    )

    @property
    def enabled(self) -> bool:
        return bool(self.methods)
