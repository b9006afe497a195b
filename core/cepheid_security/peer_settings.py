"""Settings of the connections between the processes of a cluster: bookies, repair workers, and access of readers to bookies."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from cepheid_security.principal import SecurityConfigurationError
from cepheid_security.tls import ClientTls


class PeerTlsSettings(BaseModel, frozen=True, extra="forbid"):
    """The certificate that a process shows to bookies, and to those who read its health page."""

    certificate_file: str | None = Field(
        None, description="PEM file with the certificate that this process shows to bookies. Its common name is the role."
    )
    key_file: str | None = Field(None, description="PEM file with the certificate's private key, without a password.")
    ca_file: str | None = Field(None, description="PEM file with the CAs that signed the certificates of the bookies.")
    crl: str | None = Field(
        None,
        description="PEM or DER file with the revocation lists (CRLs) of the CAs in `tls.ca_file` (a bookie: and in "
        "`tls.client_ca_file`), or a folder of such files. Connections with a certificate that one of them names are refused, and "
        "open ones are closed. A list that is past its next update stays in force. Changes are in force within 10 s. Unset: no "
        "certificate is looked up.",
    )
    plain_http: bool = Field(
        False,
        description="Whether the port of `/health`, `/ready` and `/metrics` stays without TLS, for probes and monitoring that "
        "cannot speak it.",
    )

    @property
    def enabled(self) -> bool:
        return self.certificate_file is not None

    def client_tls(self) -> ClientTls | None:
        """Return the files for connections to bookies, or None without a certificate. Raises SecurityConfigurationError."""
        if (self.certificate_file is None) != (self.key_file is None):
            raise SecurityConfigurationError("tls.certificate_file and tls.key_file are set together, or neither of them")
        if not self.enabled:
            for name in ("ca_file", "crl"):
                if getattr(self, name) is not None:
                    raise SecurityConfigurationError(
                        f"tls.{name} is set without tls.certificate_file: set both, or neither of them"
                    )
            return None
        if self.ca_file is None:
            raise SecurityConfigurationError("tls.ca_file is missing: it names the CAs that signed the certificates of bookies")
        tls = ClientTls(self.ca_file, self.certificate_file, self.key_file, self.crl)
        tls.context()  # an unusable file fails the start
        return tls


class BookieTlsSettings(PeerTlsSettings, frozen=True):
    """Encrypted ports of a bookie. Clients need a certificate, whose common name is their role."""

    certificate_file: str | None = Field(
        None,
        description="PEM file with the bookie's certificate, for its ports and for its own connections to other bookies. Setting "
        "it encrypts the gRPC port, the scan port, and the port of `/health`, `/ready` and `/metrics`.",
    )
    ca_file: str | None = Field(
        None, description="PEM file with the CAs that signed the certificates of the other bookies. Unset: `tls.client_ca_file`."
    )
    client_ca_file: str | None = Field(
        None, description="PEM file with the CAs that sign certificates of brokers, bookies and readers. Others cannot connect."
    )
    plain_port: NonNegativeInt | None = Field(
        None,
        le=65535,
        description="gRPC port without TLS that stays open as well, for everybody, while brokers get their certificates. 0: any "
        "free port. Unset: no such port.",
    )
    port: NonNegativeInt | None = Field(
        None,
        le=65535,
        description="gRPC port with TLS, while the bookie's own `port` stays open without TLS for processes that have no "
        "certificates yet. 0: any free port. Unset: the bookie's own port is the one with TLS. A bookie keeps its name and the "
        "address that others know, unlike with `tls.plain_port`.",
    )
    minimum_version: Literal["1.2", "1.3"] = Field(
        "1.2", description="Oldest version of TLS that the scan port and the health page speak."
    )

    @property
    def has_plain_port(self) -> bool:
        """Whether a gRPC port without TLS is open as well."""
        return self.plain_port is not None or self.port is not None

    def client_tls(self) -> ClientTls | None:
        """Return the files for connections to other bookies, or None without TLS. Raises SecurityConfigurationError."""
        if not self.enabled:
            for name in ("client_ca_file", "plain_port", "port", "crl"):
                if getattr(self, name) is not None:
                    raise SecurityConfigurationError(
                        f"tls.{name} is set without tls.certificate_file: set both, or neither of them"
                    )
        elif self.plain_port is not None and self.port is not None:
            raise SecurityConfigurationError("tls.port and tls.plain_port are both set: each gives the bookie a second port")
        elif self.client_ca_file is None:
            raise SecurityConfigurationError(
                "tls.client_ca_file is missing: it names the CAs that sign certificates of brokers, bookies and readers"
            )
        return PeerTlsSettings(
            certificate_file=self.certificate_file,
            key_file=self.key_file,
            ca_file=self.ca_file or self.client_ca_file,
            crl=self.crl,
        ).client_tls()


class BookieAccessSettings(BaseModel, frozen=True, extra="forbid"):
    """Which roles may do what at a bookie with TLS. Everybody else needs a read ticket, and can only read."""

    cluster_roles: tuple[str, ...] = Field(
        ("broker", "bookie"),
        description="Roles of brokers and repair workers. Only they may write, fence and recover, and read without a ticket.",
    )
    reader_roles: tuple[str, ...] = Field(
        ("admin",),
        description="Roles that may read every ledger without a ticket, such as those of operators who verify ledgers.",
    )
    certificate_role: Literal["common_name", "dns", "uri", "email"] = Field(
        "common_name",
        description="Name in a caller's certificate that is its role: the common name, or the first subject alternative name of a "
        "kind (`uri`: SPIFFE ids). As `authentication.certificate_role` of brokers.",
    )


class ReadTicketSettings(BaseModel, frozen=True, extra="forbid"):
    """Tickets that the plan service issues to readers of history, such as Spark. They are signed where clients authenticate."""

    life_s: PositiveFloat = Field(
        3600.0,
        le=7 * 86400,
        description="Time for which a ticket is valid. A reader that reads for longer gets a new one by itself. Shorter: a role "
        "whose permission was revoked reads for less long, and readers plan more often.",
    )
    rotate_s: PositiveFloat = Field(86400.0, description="Time for which one key signs tickets. Then a new key is made.")
