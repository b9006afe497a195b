"""Records of ownership: the owner of a bundle, and its history; and the mark of a namespace whose topics changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from cepheid_metadata.record import GrownRecord, Record


class BundleOwner(Record):
    """Ephemeral: this broker serves the bundle's topics. Never replaced: it is deleted, and the next owner creates its own."""

    NAME: ClassVar[str] = "bundle owner"

    broker_id: str = Field(min_length=1)
    incarnation: str = Field(min_length=1, description="Random, for one session: a broker that returns is another owner.")
    epoch: PositiveInt = Field(description="Number of this ownership of the bundle, counted over all owners.")
    addresses: dict[str, str] = Field(description="Addresses in the broker's registration.")


class BundleHistory(GrownRecord):
    """Persistent. Written in the step that creates or deletes the owner's record, so that only one of two new owners succeeds."""

    NAME: ClassVar[str] = "bundle history"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"split_at": 2}

    epoch: NonNegativeInt = Field(description="Epoch of the last owner.")
    preferred: str = Field("", description="Id of the broker that should own it next; empty: the one that all choose alike.")
    split_at: tuple[NonNegativeInt, ...] | None = Field(
        None, description="Where the bundle was split: first hashes of its parts but the first one. No broker acquires it any more."
    )


class TopicChanges(Record):
    """Mark of a namespace, written after topics were created, grown or deleted, so that watchers read the topics again."""

    NAME: ClassVar[str] = "topic changes"

    broker_id: str
    at_ms: NonNegativeInt
