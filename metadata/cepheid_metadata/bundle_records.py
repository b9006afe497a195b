"""Records of ownership: who serves a bundle now, and what outlives its owners; and the mark of a namespace whose topics changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import Field, NonNegativeInt, PositiveInt

from cepheid_metadata.record import GrownRecord, Record


class BundleOwner(Record):
    """Ephemeral: this broker serves the bundle's topics. Never replaced: it goes, and the next owner makes its own."""

    NAME: ClassVar[str] = "bundle owner"

    broker_id: str = Field(min_length=1)
    incarnation: str = Field(min_length=1, description="Random, one for each session: a broker that came back is another owner.")
    epoch: PositiveInt = Field(description="Which ownership of the bundle this is, counted over all owners.")
    addresses: dict[str, str] = Field(description="Those of the broker's registration.")


class BundleHistory(GrownRecord):
    """Persistent. Written in the step that makes or deletes the owner's record, so that only one of two takers comes through."""

    NAME: ClassVar[str] = "bundle history"
    FORMAT: ClassVar[int] = 2
    ADDED: ClassVar[Mapping[str, int]] = {"split_at": 2}

    epoch: NonNegativeInt = Field(description="Of the last owner.")
    preferred: str = Field("", description="Id of the broker that is to have it next; empty: the one that all choose alike.")
    split_at: tuple[NonNegativeInt, ...] | None = Field(
        None, description="The bundle was split here: first hashes of its parts but the first one. No broker acquires it any more."
    )


class TopicChanges(Record):
    """Of a namespace: written after topics were made, grown or deleted, so that who watches it looks again."""

    NAME: ClassVar[str] = "topic changes"

    broker_id: str
    at_ms: NonNegativeInt
