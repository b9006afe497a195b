"""Settings of `cepheid broker`: flags over CEPHEID_BROKER_NAME over the TOML file over these defaults."""

from __future__ import annotations

import socket
from typing import Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from cepheid_broker.serving import ServingSettings
from cepheid_managed_ledger import ManagedLedgerConfig

_ANY_ADDRESS = ("0.0.0.0", "::", "")


class BrokerRoleSettings(ServingSettings):
    """One broker as a process."""

    metadata: str = Field(min_length=1, description="Metadata store of the cluster: zk://host:port[,host:port…][/chroot].")
    # The C++ client tries to connect again about 3.1 s and 6.3 s after its broker died, then at 12.7 s: the session has to be over
    # before 6.3 s. kazoo's own thread sends the heartbeats, so that a busy loop does not cost the session.
    metadata_session_timeout_s: PositiveFloat = Field(
        4.0,
        le=3600,
        description="Silence after which the metadata store takes this broker for dead, and others serve its topics. Longer: "
        "survives longer pauses, clients of a dead broker wait longer.",
    )
    metadata_wait_s: PositiveFloat = Field(
        60.0, description="How long a start waits for a metadata store that cannot be reached, before it gives up."
    )
    broker_id: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._:-]{1,200}$",
        description="Name in metadata and in the admin API. Unset: advertised host and admin port.",
    )
    advertised_port: NonNegativeInt | None = Field(
        None, le=65535, description="Port that lookups tell clients. Unset: the bound one."
    )
    advertised_admin_port: NonNegativeInt | None = Field(
        None, le=65535, description="Port of the admin API that other brokers and clients are told. Unset: the bound one."
    )
    ensemble_size: PositiveInt = Field(
        3, le=64, description="E: bookies that a ledger is spread over, where no policy says otherwise. So many must be writable."
    )
    write_quorum: PositiveInt = Field(3, le=64, description="Qw: bookies that get each entry.")
    ack_quorum: PositiveInt = Field(
        2, le=64, description="Qa: bookies that must have an entry before it is acknowledged. Qa - 1 may be lost at once."
    )

    @model_validator(mode="after")
    def _check_quorums(self) -> Self:
        if not self.ensemble_size >= self.write_quorum >= self.ack_quorum:
            raise ValueError(
                f"E {self.ensemble_size}, Qw {self.write_quorum}, Qa {self.ack_quorum}: E >= Qw >= Qa must hold "
                "(ensemble_size, write_quorum, ack_quorum)"
            )
        return self

    @property
    def shown_host(self) -> str:
        return self.advertised_host or (socket.gethostname() if self.host in _ANY_ADDRESS else self.host)

    @property
    def registration_patience_s(self) -> float:
        """A process that is gone is in metadata for one session timeout at most."""
        return 2 * self.metadata_session_timeout_s

    @property
    def ledger_config(self) -> ManagedLedgerConfig:
        return ManagedLedgerConfig(ensemble_size=self.ensemble_size, write_quorum=self.write_quorum, ack_quorum=self.ack_quorum)
