"""Notices that this process was forked: a child shares its parent's sockets, and must not write amid the parent's frames."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Severable(Protocol):
    def sever(self) -> None: ...


class _Forks:
    def __init__(self) -> None:
        self.generation = 0
        self.severable: weakref.WeakSet[Severable] = weakref.WeakSet()

    def on_child(self) -> None:
        self.generation += 1
        for each in list(self.severable):
            each.sever()
        self.severable.clear()


_forks = _Forks()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork either
    os.register_at_fork(after_in_child=_forks.on_child)


def generation() -> int:
    """Return how many forks lie between the first process and this one, since the client was imported."""
    return _forks.generation


def sever_in_children(severable: Severable) -> None:
    """Call `sever` in every child that is forked from now on."""
    _forks.severable.add(severable)
