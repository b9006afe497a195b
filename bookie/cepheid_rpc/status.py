"""Statuses of a bookie, in three classes that must never be mixed.

Rule 1: `certain_no` means "I never acknowledged it". Whatever a bookie is not sure of is *unknown*: mixing the two loses data.
"""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """A bookie's answer for one group, one range of entries, or one request."""

    OK = 0
    NO_LEDGER = 1  # certain: this bookie never acknowledged anything of the ledger
    NO_ENTRY = 2  # certain: this bookie never acknowledged the entry
    FENCED = 3  # a regular add after a fence; says nothing about the entry on other bookies
    UNAUTHORIZED = 4  # a master key other than the ledger's
    READ_ONLY = 5  # this bookie accepts no regular adds
    OVERLOADED = 6  # limits are reached; nothing was stored; try again later
    NO_SPACE = 7  # the disk is (nearly) full; nothing was stored; try again when there is space
    BAD_DIGEST = 8  # the entry as received, or as stored here, does not match its digest
    IO_ERROR = 9  # the disk reported an error
    UNKNOWN = 10  # may have been forgotten here (limbo), or could not be determined
    BAD_REQUEST = 11  # malformed, or a version this bookie does not know
    STOPPED = 12  # the bookie is shutting down or its connection ended
    TICKET_EXPIRED = 13  # the read ticket was valid once: plan again to get a new one
    TICKET_KEY_UNKNOWN = 14  # this bookie does not know the key that signed the read ticket: it may arrive later, or be deleted

    @property
    def certain_no(self) -> bool:
        return self in (Status.NO_LEDGER, Status.NO_ENTRY)

    @property
    def retriable(self) -> bool:
        """Whether the same request may succeed later at the same bookie."""
        return self in _RETRIABLE


_RETRIABLE = (
    Status.OVERLOADED,
    Status.NO_SPACE,
    Status.IO_ERROR,
    Status.UNKNOWN,
    Status.STOPPED,
    Status.TICKET_KEY_UNKNOWN,
)
