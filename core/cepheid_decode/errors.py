"""Errors of reading a topic's history. Messages name the topic and what to do."""

from __future__ import annotations

from typing import Any

from cepheid_ports import CepheidError


class ScanError(CepheidError):
    """Base class of all errors of reading history."""


class BadOptionError(ScanError):
    """An invalid value of an option; the message says what to use instead."""


class NoSuchTopicError(ScanError):
    """No topic of that name, or none that matches the pattern."""

    hint = "see `cepheid topics list NAMESPACE`; failOnMissingTopic=false reads what there is"


class PlanUnavailableError(ScanError):
    """The plan of the history could not be requested, or is not available at the moment."""

    retriable = True
    hint = "check the address, and that a broker is up"


class AdminRefusedError(ScanError):
    """A broker's admin API rejected a request. `status` is that of HTTP, `reason` the server's own text."""

    hint = "401 and 403: check the token and its rights"

    def __init__(self, message: str, *, status: int, reason: str = "", **facts: Any) -> None:
        super().__init__(message, status=status, **facts)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return super().__str__() if self.status in (401, 403) else str(self.args[0])


class DataLossError(ScanError):
    """A requested range is no longer kept: it was trimmed, or the topic was deleted and created again."""

    hint = "keep more (cepheid namespaces set NAMESPACE retention …), or accept the loss with failOnDataLoss=false"


class EntriesUnreadableError(ScanError):
    """Some entries could not be read from any replica; the message has the answer of each bookie."""

    retriable = True
    hint = "see which bookies are down, and `cepheid ledgers verify`"


class DamagedEntryError(EntriesUnreadableError):
    """All bookies that should have an entry were asked, and no copy matches its digest."""

    retriable = False
    hint = "onBadRecord=skip leaves such entries out and counts them, onBadRecord=null keeps a row; see `cepheid ledgers verify`"


class BadRecordError(ScanError):
    """A stored message that cannot be returned as requested, because of its bytes, its schema or its encryption."""

    hint = "onBadRecord=skip leaves such messages out and counts them, onBadRecord=null keeps their row"
