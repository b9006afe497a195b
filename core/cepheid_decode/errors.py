"""What can go wrong between a question about a topic's history and its rows. Texts name the topic and what to do."""

from __future__ import annotations

from typing import Any

from cepheid_ports import CepheidError


class ScanError(CepheidError):
    """Of every reading of history."""


class BadOptionError(ScanError):
    """A value that the caller gave, with what would do instead."""


class NoSuchTopicError(ScanError):
    """No topic of that name, or none that the pattern names."""

    hint = "see `cepheid topics list NAMESPACE`; failOnMissingTopic=false reads what there is"


class PlanUnavailableError(ScanError):
    """Whoever knows where the history lies could not be asked, or cannot say now."""

    retriable = True
    hint = "check the address, and that a broker is up"


class AdminRefusedError(ScanError):
    """A broker's admin API said no. `status` is that of HTTP, `reason` the server's own text."""

    hint = "401 and 403: check the token and its rights"

    def __init__(self, message: str, *, status: int, reason: str = "", **facts: Any) -> None:
        super().__init__(message, status=status, **facts)
        self.status = status
        self.reason = reason

    def __str__(self) -> str:
        return super().__str__() if self.status in (401, 403) else str(self.args[0])


class DataLossError(ScanError):
    """A range that was asked for is not kept any more: trimmed, or the topic was deleted and made again."""

    hint = "keep more (cepheid namespaces set NAMESPACE retention …), or accept the loss with failOnDataLoss=false"


class EntriesUnreadableError(ScanError):
    """No replica of some entries could be read, with what each bookie said."""

    retriable = True
    hint = "see which bookies are down, and `cepheid ledgers verify`"


class DamagedEntryError(EntriesUnreadableError):
    """Everybody who should have an entry was asked, and nobody's copy matches its digest."""

    retriable = False
    hint = "onBadRecord=skip leaves such entries out and counts them, onBadRecord=null keeps a row; see `cepheid ledgers verify`"


class BadRecordError(ScanError):
    """A stored message that cannot be what the reader asks for: its bytes, its schema, its encryption."""

    hint = "onBadRecord=skip leaves such messages out and counts them, onBadRecord=null keeps their row"
