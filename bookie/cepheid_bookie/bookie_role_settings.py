"""Settings of `cepheid bookie`: flags over CEPHEID_BOOKIE_NAME over the TOML file over these defaults."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat

from cepheid_bookie.settings import BOOKIE_ID_PATTERN, BookieSettings, StorageSettings
from cepheid_ports import HOST_PATTERN, CepheidError, host_port

_ANY_ADDRESS = ("0.0.0.0", "::", "")


class BookieNameError(CepheidError):
    """Nothing stable to name the bookie by."""

    hint: ClassVar[str] = "name it: `--id`; the name must stay the same for as long as its data lives"


class BookieRoleSettings(BaseModel, frozen=True, extra="forbid"):
    """One storage node as a process."""

    metadata: str = Field(min_length=1, description="Metadata store of the cluster: zk://host:port[,host:port…][/chroot].")
    # As long as a broker's, and for its reasons: see broker_role_settings.py.
    metadata_session_timeout_s: PositiveFloat = Field(
        4.0,
        le=3600,
        description="Silence after which the metadata store takes this bookie for dead. Longer: survives longer pauses.",
    )
    metadata_wait_s: PositiveFloat = Field(
        60.0, description="How long a start waits for a metadata store that cannot be reached, before it gives up."
    )
    data_dir: Path = Field(Path("bookie-data"), description="Where entries, index and (unless set apart) journal are kept.")
    journal_dir: Path | None = Field(None, description="Where the journal is kept. A disk of its own makes publishing faster.")
    bookie_id: str | None = Field(
        None,
        pattern=BOOKIE_ID_PATTERN,
        description="Name in metadata; must never change. Unset: advertised host (or this machine's name) and port.",
    )
    host: str = Field("127.0.0.1", description="Address to bind. 0.0.0.0: all of them.")
    port: NonNegativeInt = Field(3181, le=65535, description="gRPC port, for brokers and readers. 0: any free one.")
    scan_port: NonNegativeInt = Field(
        0,
        le=65535,
        description="Port on which Spark and other readers past the brokers get stored entries. 0: any free one. They are told "
        "which; whoever cannot reach it reads by gRPC, at twice the cost.",
    )
    advertised_host: str | None = Field(
        None,
        pattern=HOST_PATTERN,
        description="Host that brokers are told. Unset: the bound one, or this machine's name when that is all addresses.",
    )
    advertised_port: NonNegativeInt | None = Field(None, le=65535, description="Port that brokers are told. Unset: the bound one.")
    http_host: str | None = Field(None, description="Address of health and metrics. Unset: as `host`.")
    http_port: NonNegativeInt = Field(8000, le=65535, description="Port of /health, /ready and /metrics. 0: any free one.")
    rack: str | None = Field(
        None,
        min_length=1,
        max_length=200,
        description="Rack or zone it stands in: Spark tasks there prefer its replicas. Set it once no older release is running.",
    )
    storage: StorageSettings = Field(StorageSettings(), description="Bounds and intervals of the storage itself.")

    @property
    def shown_host(self) -> str:
        return self.advertised_host or (socket.gethostname() if self.host in _ANY_ADDRESS else self.host)

    @property
    def shown_http_host(self) -> str:
        return self.shown_host if self.http_host is None or self.http_host in _ANY_ADDRESS else self.http_host

    @property
    def name(self) -> str:
        """The bookie's id. Raises BookieNameError."""
        if self.bookie_id is not None:
            return self.bookie_id
        if self.port == 0:
            raise BookieNameError("a bookie on any free port has no stable address to be named by", port=0)
        return host_port(self.advertised_host or socket.gethostname(), self.advertised_port or self.port)

    def of_storage(self, cluster_id: str) -> BookieSettings:
        return BookieSettings(bookie_id=self.name, cluster_id=cluster_id, **dict(self.storage))
