"""Settings of TLS, authentication and authorization, for every process that clients connect to."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from cepheid_security.authorization import Roles
from cepheid_security.principal import SecurityConfigurationError
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
    own_certificate_file: str | None = Field(
        None,
        description="PEM file with the certificate that this process shows to other brokers and to bookies. Unset: that of "
        "`tls.certificate_file`. Set it where a CA issues certificates for servers alone.",
    )
    own_key_file: str | None = Field(None, description="PEM file with the private key of `tls.own_certificate_file`.")
    client_ca_file: str | None = Field(None, description="PEM file with the CAs that sign certificates of clients.")
    client_certificates: Literal["none", "optional", "required"] = Field(
        "none", description="Whether clients are asked for a certificate. A certificate is what the method `tls` authenticates by."
    )
    crl: str | None = Field(
        None,
        description="PEM or DER file with the revocation lists (CRLs) of the CAs in `tls.client_ca_file` and `tls.ca_file`, or a "
        "folder of such files. Connections with a certificate that one of them names are refused, and open ones are closed. A "
        "list that is past its next update stays in force. Changes are in force within 10 s. Unset: no certificate is looked up.",
    )
    minimum_version: Literal["1.2", "1.3"] = Field("1.2", description="Oldest version of TLS that is spoken.")
    reload_s: PositiveFloat = Field(
        10.0, description="Interval between looks for new certificate files. They are used for new connections, without a restart."
    )

    @property
    def enabled(self) -> bool:
        return self.certificate_file is not None

    @property
    def looks_up_revoked_clients(self) -> bool:
        """Whether certificates of clients are looked up in the lists of `crl`."""
        return self.enabled and self.crl is not None and self.client_certificates != "none"

    @property
    def own_tls(self) -> ClientTls | None:
        """Files that this process connects to the brokers and bookies of its cluster with; None without TLS.

        Raises SecurityConfigurationError.
        """
        if (self.own_certificate_file is None) != (self.own_key_file is None):
            raise SecurityConfigurationError("tls.own_certificate_file and tls.own_key_file are set together, or neither of them")
        if not self.enabled:
            return None
        own = (self.own_certificate_file or self.certificate_file, self.own_key_file or self.key_file)
        return ClientTls(self.ca_file, *own, crl=self.crl if self.ca_file is not None else None)


class OidcSettings(BaseModel, frozen=True, extra="forbid"):
    """Issuers of OpenID Connect, whose tokens the method `oidc` accepts. Their keys are fetched from the issuer."""

    issuers: tuple[str, ...] = Field(
        (), description="URLs of the issuers, exactly as their tokens name them in the claim `iss`. Others are never contacted."
    )
    audiences: tuple[str, ...] = Field((), description="Audiences that tokens may be for. A token must be for one of them.")
    role_claim: str = Field(
        "sub", min_length=1, description="Claim of a token that is the role. Issuers differ: `sub`, `azp`, or another one."
    )
    ca_file: str | None = Field(
        None, description="PEM file with the CAs of the issuers' own certificates. Unset: the CAs of the system."
    )
    refresh_s: PositiveFloat = Field(
        3600.0,
        description="Age from which keys are fetched again. A token that names an unknown key has them fetched at once, so a "
        "shorter interval only withdraws old keys sooner.",
    )
    stale_s: PositiveFloat = Field(
        24 * 3600.0,
        description="Age up to which known keys are used while the issuer cannot be reached. After it its tokens are refused.",
    )


class AuditSettings(BaseModel, frozen=True, extra="forbid"):
    """The audit log: a line of JSON for each change and for each denial."""

    enabled: bool | None = Field(
        None,
        description="Whether changes and denials are recorded. Unset: they are where authorization is on, at a bookie where TLS is "
        "set up.",
    )
    file: str | None = Field(
        None,
        description="File of the audit log; `-` is standard output. Unset: `audit/audit.log` in the data directory, and standard "
        "output where a process has no data directory.",
    )
    max_bytes: PositiveInt = Field(
        64 << 20, ge=4096, description="Size of the file in bytes from which it is renamed to `.1` and a new one is begun."
    )
    max_files: PositiveInt = Field(10, le=1000, description="Number of files that are kept, the current one included.")
    max_waiting_lines: PositiveInt = Field(
        10_000, description="Lines that may wait to be written. Beyond it lines are lost and counted."
    )


class AuthenticationSettings(BaseModel, frozen=True, extra="forbid"):
    """Who may connect. Without a method everybody may; with one, nobody without credentials."""

    methods: tuple[Literal["token", "basic", "tls", "oidc"], ...] = Field(
        (),
        description="How clients may prove who they are: a token, a user name with a password, a TLS certificate, or a token of "
        "an OpenID Connect issuer.",
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

    reload_s: PositiveFloat = Field(
        10.0,
        description="Interval between looks for new files of keys and passwords. They are used for new connections, without a "
        "restart.",
    )
    certificate_role: Literal["common_name", "dns", "uri", "email"] = Field(
        "common_name",
        description="Name in a client's certificate that is its role, for the method `tls`: the common name, or the first subject "
        "alternative name of a kind (`uri`: SPIFFE ids).",
    )
    oidc: OidcSettings = Field(OidcSettings(), description="Issuers of OpenID Connect.")

    @property
    def enabled(self) -> bool:
        return bool(self.methods)


class AuthorizationSettings(BaseModel, frozen=True, extra="forbid"):
    """What authenticated clients may do. While it is off, each of them may do everything."""

    enabled: bool = Field(
        False, description="Whether clients need permissions. It requires `authentication.methods`. What is not granted is denied."
    )
    enforced: bool = Field(
        True,
        description="Whether what is not granted is denied. `false` only while a running cluster is secured: such requests are "
        "logged (event authorization.would_deny) and allowed then, so that they can be granted first.",
    )
    super_user_roles: tuple[str, ...] = Field((), description="Roles that may do everything, in all tenants.")
    proxy_roles: tuple[str, ...] = Field(
        (),
        description="Roles of proxies. Such a client must name the principal for whom it speaks, and needs the same permissions "
        "as that principal.",
    )
    peer_roles: tuple[str, ...] = Field(
        (), description="Roles of the brokers and repair workers of this cluster, for the calls that they make to each other."
    )
    monitoring_roles: tuple[str, ...] = Field(
        (), description="Roles that read all metrics, such as that of a Prometheus server, and may do nothing else by that."
    )
    stale_s: PositiveFloat = Field(
        300.0,
        description="Time for which known permissions are used while the metadata store cannot be reached. After it only "
        "super-users are served. Longer: clients survive longer outages, and a revoked role may go on for longer during one.",
    )

    @property
    def roles(self) -> Roles:
        return Roles(frozenset(self.super_user_roles), frozenset(self.proxy_roles), frozenset(self.peer_roles))

    def check(self) -> None:
        """Raise SecurityConfigurationError if no role could administer a process with these settings."""
        if self.enabled and not self.super_user_roles:
            raise SecurityConfigurationError(
                "authorization.enabled needs authorization.super_user_roles: without one no role may create tenants or grant "
                "permissions; name the role of your administrators there"
            )

    def check_peers(self, authentication: AuthenticationSettings) -> None:
        """Raise SecurityConfigurationError if the brokers of the cluster would refuse each other's calls."""
        if not self.enabled or self.peer_roles:
            return
        from cepheid_security.principal import AuthenticationError
        from cepheid_security.tokens import read_unverified

        role = None
        if authentication.own_token_file is not None:
            try:
                _, claims = read_unverified(Path(authentication.own_token_file).read_text(encoding="ascii").strip())
                role = claims.get(authentication.role_claim)
            except (OSError, UnicodeDecodeError, AuthenticationError) as error:
                raise SecurityConfigurationError(
                    f"authentication.own_token_file names {authentication.own_token_file}, which has no token: {error}"
                ) from None
        if role not in self.super_user_roles:
            shown = "is not set" if role is None else f"has the role {role!r}"
            raise SecurityConfigurationError(
                "authorization.peer_roles is empty: brokers would refuse each other's calls. Name the role of "
                f"authentication.own_token_file there, which {shown}"
            )
