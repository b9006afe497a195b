"""Processes requests of many callers in groups: those that arrive while the worker has one group form the next.

    ask ─► waiting ──(one job at a time)──► worker: work(group) ──one loop callback──► every caller of the group has its answer

The group sizes itself: a single request is sent in the same loop turn; under load, a group is what gathered during one job.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from cepheid_metadata.errors import StoreUnavailableError
from cepheid_ports import Worker

Q = TypeVar("Q")
MAX_GROUP_BYTES = 4 * 1024 * 1024


class GroupLane(Generic[Q]):
    """Groups requests. `work` runs in the worker, and returns an answer or an exception per request, or raises for all."""

    def __init__(
        self,
        name: str,
        worker: Worker,
        work: Callable[[Sequence[Q]], Sequence[Any]],
        *,
        max_group: int = 1_024,
        max_waiting: int = 100_000,
        on_group: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._worker = worker
        self._work = work
        self._on_group = on_group  # called after each job, before its callers are answered
        self._max_group = max_group
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Q, int, asyncio.Future[Any]]] = deque()
        self._busy = False
        self.groups = 0
        self.requests = 0

    def __repr__(self) -> str:
        return f"<GroupLane {self._name}: {len(self._waiting)} waiting, {self.requests} requests in {self.groups} groups>"

    async def ask(self, request: Q, size_bytes: int = 0) -> Any:
        if len(self._waiting) >= self._max_waiting:
            message = f"{len(self._waiting)} requests wait for the metadata store's {self._name} lane, the limit"
            raise StoreUnavailableError(message, waiting=len(self._waiting))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((request, size_bytes, answer))
        if not self._busy:
            self._busy = True
            loop.call_soon(self._start_group)  # requests of this turn join the group
        return await answer

    def refuse_waiting(self, error: Exception) -> None:
        """Fail what has not been given to the worker yet; none of it was attempted."""
        waiting, self._waiting = self._waiting, deque()
        for _, _, answer in waiting:
            if not answer.done():
                answer.set_exception(error)

    def _start_group(self) -> None:
        requests: list[Q] = []
        answers: list[asyncio.Future[Any]] = []
        size_bytes = 0
        while self._waiting and len(requests) < self._max_group and size_bytes < MAX_GROUP_BYTES:
            request, request_bytes, answer = self._waiting.popleft()
            if not answer.cancelled():
                requests.append(request)
                answers.append(answer)
                size_bytes += request_bytes
        self._busy = bool(requests)
        if not requests:
            return
        self.groups += 1
        self.requests += len(requests)
        self._worker.submit(lambda: self._work(requests), lambda result, error: self._finish(answers, result, error))

    def _finish(self, answers: list[asyncio.Future[Any]], results: Sequence[Any] | None, error: BaseException | None) -> None:
        self._on_group()
        if results is None:
            assert error is not None
            results = [error] * len(answers)
        for answer, result in zip(answers, results, strict=True):
            if answer.done():
                continue  # cancelled meanwhile
            if isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)
        self._start_group()
