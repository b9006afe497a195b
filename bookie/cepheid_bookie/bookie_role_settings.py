"""Settings of `cepheid bookie`: flags override CEPHEID_BOOKIE_NAME, that the TOML file, and that these defaults."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from cepheid_bookie.settings import BookieServerSettings, StorageSettings
from cepheid_ports import HOST_PATTERN, RACK_PATTERN, CepheidError, host_port
from cepheid_security.peer_settings import BookieAccessSettings, BookieTlsSettings
from cepheid_security.settings import AuditSettings

BOOKIE_ID_PATTERN = r"^[A-Za-z0-9._:-]{1,200}$"
_ANY_ADDRESS = ("0.0.0.0", "::", "")


class BookieNameError(CepheidError):
    """There is no stable name for the bookie."""

    hint: ClassVar[str] = "name it with `--id`; the name must stay the same for as long as its data exists"


class BookieRoleSettings(BaseModel, frozen=True, extra="forbid"):
    """Settings of a storage node that runs as a process."""

    metadata: str = Field(
        min_length=1, description="Address of the cluster's metadata store: `zk://host:port[,host:port…][/root]`."
    )
    # As long as a broker's, for the same reasons: see BrokerRoleSettings.
    metadata_session_timeout_s: PositiveFloat = Field(
        4.0,
        le=3600,
        description="Silence after which the metadata store treats this bookie as dead. Longer: it survives longer pauses, and a "
        "dead bookie is noticed later.",
    )
    metadata_wait_s: PositiveFloat = Field(
        60.0, description="Time for which a start waits for a metadata store that it cannot reach, before it gives up."
    )
    metadata_auth_file: str | None = Field(
        None,
        description="File with the ZooKeeper user of this cluster, as `digest:user:password`. What the cluster creates is then "
        "readable by this user alone. Unset: what the environment variable `CEPHEID_METADATA_AUTH` says.",
    )
    metadata_private: bool = Field(
        True,
        description="Whether what this process creates in ZooKeeper is for the user of `metadata_auth_file` alone. `false` only "
        "while other processes of the cluster still run without that user.",
    )
    data_dir: Path = Field(
        Path("bookie-data"), description="Directory of entries and index, and of the journal unless `journal_dir` is set."
    )
    journal_dir: Path | None = Field(
        None, description="Directory of the journal. A disk of its own makes publishing faster. Unset: `data_dir`."
    )
    bookie_id: str | None = Field(
        None,
        pattern=BOOKIE_ID_PATTERN,
        description="Name in metadata, which must never change and must never be given to an empty disk. Unset: `host:port`, from "
        "`advertised_host` or the name of this machine.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on. `0.0.0.0`: all addresses.")
    port: NonNegativeInt = Field(3181, le=65535, description="gRPC port for brokers and readers. 0: any free port.")
    scan_port: NonNegativeInt = Field(
        0,
        le=65535,
        description="Port on which Spark and other readers past the brokers get stored entries. 0: any free port, which readers "
        "learn from the bookie. Set it where a firewall needs to know: a reader that cannot reach it uses the gRPC port, at twice "
        "the cost.",
    )
    advertised_host: str | None = Field(
        None,
        pattern=HOST_PATTERN,
        description="Host under which brokers and readers reach this bookie. Unset: `host`, or the name of this machine if it "
        "listens on all addresses.",
    )
    advertised_port: NonNegativeInt | None = Field(
        None, le=65535, description="gRPC port under which brokers and readers reach this bookie. Unset: the one it listens on."
    )
    http_host: str | None = Field(
        None, description="Address on which health checks and metrics are served. Unset: the same as `host`."
    )
    http_port: NonNegativeInt = Field(8000, le=65535, description="Port of `/health`, `/ready` and `/metrics`. 0: any free port.")
    rack: str | None = Field(
        None,
        pattern=RACK_PATTERN,
        description="Where this bookie runs: `region/rack`, or a rack without a region. Copies of an entry are put into different "
        "racks, and readers prefer replicas in their own. Set it only when all processes of the cluster run a release that knows "
        "it.",
    )
    report_free_space: bool = Field(
        False,
        description="Whether this bookie reports the free space of its data disk to metadata. New ledgers are then given to "
        "bookies in proportion to their free space. Set it only when all processes of the cluster run a release that knows it: "
        "others cannot read its registration.",
    )
    storage: StorageSettings = Field(StorageSettings(), description="Bounds and intervals of the storage.")
    grpc_server: BookieServerSettings = Field(BookieServerSettings(), description="Bounds of the gRPC server.")
    tls: BookieTlsSettings = Field(BookieTlsSettings(), description="Encrypted ports.")
    access: BookieAccessSettings = Field(BookieAccessSettings(), description="Which roles may do what, where `tls` is set up.")
    audit: AuditSettings = Field(AuditSettings(), description="The audit log: it has what the ports refuse, where `tls` is set up.")

    @property
    def shown_host(self) -> str:
        return self.advertised_host or (socket.gethostname() if self.host in _ANY_ADDRESS else self.host)

    @property
    def shown_http_host(self) -> str:
        return self.shown_host if self.http_host is None or self.http_host in _ANY_ADDRESS else self.http_host

    @property
    def name(self) -> str:
        """Return the bookie's id. Raises BookieNameError."""
        if self.bookie_id is not None:
            return self.bookie_id
        if self.port == 0:
            raise BookieNameError("a bookie on any free port has no stable address to be named by", port=0)
        name = host_port(self.advertised_host or socket.gethostname(), self.advertised_port or self.port)
        if re.fullmatch(BOOKIE_ID_PATTERN, name) is None:
            raise BookieNameError(f"{name} cannot be the name of a bookie: a name has letters, digits and . _ : - only")
        return name
