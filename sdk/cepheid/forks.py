"""Detects forks of this process: a child shares its parent's sockets, and must not write between the parent's frames."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from typing import Protocol


class Severable(Protocol):
    def sever(self) -> None: ...


class _Forks:
    def __init__(self) -> None:
        self.generation = 0
        self.severable: weakref.WeakSet[Severable] = weakref.WeakSet()
        self.kept: list[object] = []

    def on_child(self) -> None:
        self.generation += 1
        inherited, self.severable = list(self.severable), weakref.WeakSet()
        for each in inherited:
            each.sever()


_forks = _Forks()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_forks.on_child)


def generation() -> int:
    """Return the number of forks between the process that imported the client and this one."""
    return _forks.generation


def sever_in_children(severable: Severable) -> None:
    """Call `sever` in the next child forked from this process. `sever` may request it again, for children of that child."""
    _forks.severable.add(severable)


def close_inherited(descriptor: int) -> None:
    """In a forked child: release a file that its parent uses, without a shutdown, which would end the connection for both.

    The descriptor stays taken, by the null device, until its object closes it: that close, or a call for an event queue shared
    with the parent, then does not affect the parent.
    """
    with suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        try:
            os.dup2(null, descriptor, inheritable=False)
        finally:
            os.close(null)


def keep_inherited(*inherited: object) -> None:
    """In a forked child: never finalize these. The parent's event loops and tasks would clean up what the parent still uses."""
    _forks.kept.extend(inherited)
