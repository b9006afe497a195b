"""The base class of every operating error."""

from __future__ import annotations

from typing import Any, ClassVar


class CepheidError(Exception):
    """An operating error or invalid input: what happened, to which object, and what to do.

    `retriable` is for callers: the same call may succeed later without anyone doing anything. `hint` is for the operator:
    what to do about it. `facts` are the fields of the log line.
    """

    retriable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message} ({self.hint})" if self.hint else message
