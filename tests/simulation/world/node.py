"""A process of the simulated cluster: everything it runs stops in one instant when it crashes.

    node.start(coroutine) ──► tasks, timers and callbacks inherit the node through their context ──► the loop asks `alive`
                                                                                                     before each step

Rule 1: a crashed node never takes another step; a restarted process is a new `Node` (name kept, incarnation + 1).
Rule 2: a paused node's steps are kept, in order, and taken when it resumes: it does not notice that time went by.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any

NODE: contextvars.ContextVar[Node] = contextvars.ContextVar("simulated node")


class NodeCrashed(BaseException):
    """The process ended here. No `except Exception` of the code under test may survive it."""


class Node:
    def __init__(self, name: str, incarnation: int = 1) -> None:
        self.name = name
        self.incarnation = incarnation
        self.alive = True
        self.paused = False
        self.held: list[asyncio.Handle] = []  # steps that fell due while the node was paused
        self.on_crash: list[Callable[[], None]] = []
        self.context = contextvars.copy_context()
        self.context.run(NODE.set, self)
        self._tasks: list[asyncio.Task[Any]] = []  # kept: collecting a dead coroutine would run its `finally` at a random time

    def __repr__(self) -> str:
        return f"<Node {self.name}#{self.incarnation}{'' if self.alive else ', crashed'}{', paused' if self.paused else ''}>"

    def start(self, work: Coroutine[Any, Any, Any], *, name: str) -> asyncio.Task[Any]:
        """Runs `work` as the node's own task."""
        return asyncio.get_running_loop().create_task(work, name=f"{self.name}/{name}", context=self.context)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        asyncio.get_running_loop().call_soon(callback, *args, context=self.context)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback, *args, context=self.context)

    def crash(self) -> None:
        """Ends the process. May be called from inside it, between any two of its steps."""
        if self.alive:
            self.alive = False
            self.held.clear()
            for callback in self.on_crash:
                callback()

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        asyncio.get_running_loop()._ready.extend(self.held)  # type: ignore[attr-defined]
        self.held.clear()


def current_node() -> Node | None:
    """The node whose code runs now; None in the world's own code."""
    return NODE.get(None)
