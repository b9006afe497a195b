"""The in-process connection: pulls, holds back, breaks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cepheid_rpc import AddAnswer, AddRequest, BookieUnavailableError, LacRequest, ReadRequest, Status
from tests.bookie.bookie_support import KEY, KiB, Machine, group_of
from tests.support import wait_until


class Source:
    """A ledger client's channel, in small."""

    def __init__(self, requests: Sequence[AddRequest] = ()) -> None:
        self.waiting = deque(requests)
        self.pulled = 0
        self.answers: list[AddAnswer] = []
        self.broken: list[BaseException] = []

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        message: list[AddRequest] = []
        size = 0
        while self.waiting and (not message or size < max_bytes):
            message.append(self.waiting.popleft())
            size += len(message[-1].group.data)
        self.pulled += bool(message)
        return message

    def on_answers(self, answers: Sequence[AddAnswer]) -> None:
        self.answers += answers

    def on_broken(self, error: BaseException) -> None:
        self.broken.append(error)

    def answered(self) -> int:
        return sum(answer.last_entry_id - answer.first_entry_id + 1 for answer in self.answers)


def requests_of(count: int, size: int = 10) -> list[AddRequest]:
    return [AddRequest(group_of(7, first, size=size), KEY) for first in range(count)]


async def test_what_waits_travels_together_and_is_answered() -> None:
    async with Machine().bookie() as bookie:
        connection = bookie.connection()
        source = Source(requests_of(30))
        stream = connection.open_add_stream(source)
        stream.wake()
        stream.wake()
        await wait_until(lambda: source.answered() == 30)
        assert source.pulled == 1
        assert source.answers == [AddAnswer(7, 0, 29, Status.OK)]
        assert connection.bookie_id == "bookie-1"
        assert (await connection.read_lac(LacRequest(7, KEY))).status is Status.OK
        assert [chunk.next_entry_id async for chunk in connection.read(ReadRequest(7, 0, 29))][-1] == 30
        await connection.aclose()


async def test_a_full_bookie_is_not_fed_and_goes_on_by_itself_without_a_refusal() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["flush"].hold()
        source = Source(requests_of(4_000, size=KiB))
        bookie.connection().open_add_stream(source).wake()
        await wait_until(lambda: bookie.is_full)
        left = len(source.waiting)
        assert left > 2_000
        machine.workers["flush"].release()
        await wait_until(lambda: source.answered() == 4_000)
        assert {answer.status for answer in source.answers} == {Status.OK}


async def test_a_stopped_bookie_breaks_its_streams_once() -> None:
    bookie = await Machine().open()
    source = Source(requests_of(3))
    stream = bookie.connection().open_add_stream(source)
    stream.wake()
    await wait_until(lambda: source.answered() == 3)
    await bookie.aclose()
    await bookie.aclose()
    assert [type(error) for error in source.broken] == [BookieUnavailableError]
    source.waiting.extend(requests_of(1))
    stream.wake()
    assert source.pulled == 1


async def test_answers_after_a_stream_was_closed_are_dropped() -> None:
    machine = Machine()
    async with machine.bookie() as bookie:
        machine.workers["journal"].hold()
        connection = bookie.connection()
        source = Source(requests_of(3))
        stream = connection.open_add_stream(source)
        stream.wake()
        await wait_until(lambda: source.pulled == 1)
        await stream.aclose()
        machine.workers["journal"].release()
        await bookie.checkpoint()
        assert (source.answers, source.broken) == ([], [])
        await connection.aclose()
