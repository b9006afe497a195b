"""The simulated network keeps the promises of a connection, and breaks what it may break."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import pytest

from cepheid_rpc import (
    AddAnswer,
    AddRequest,
    BookieUnavailableError,
    DigestMismatchError,
    ExplicitLac,
    LacAnswer,
    LacRequest,
    MalformedGroupError,
    ReadAnswer,
    ReadRequest,
    Status,
    encode_group,
)
from tests.simulation.faults.plan import CALM, FaultPlan, Faults
from tests.simulation.world.node import Node
from tests.simulation.world.sim_connection import SimConnections
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_wire import SimAddStream
from tests.simulation.world.virtual_loop import run_simulated
from tests.support import wait_until

pytestmark = pytest.mark.virtual_time

KEY = bytes(16)


class EchoBookie:
    """Says OK to everything, at once, and remembers it: the transport's other end, without storage."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.calls = 0

    def add(self, requests: Sequence[AddRequest], on_answers: Callable[[Sequence[AddAnswer]], None]) -> None:
        for request in requests:
            group = request.group
            self.added.append(group.first_entry_id)
            on_answers([AddAnswer(group.ledger_id, group.first_entry_id, group.last_entry_id, Status.OK)])

    async def read_lac(self, request: LacRequest) -> LacAnswer:
        self.calls += 1
        return LacAnswer(Status.OK, last_add_confirmed=7)

    async def read(self, request: ReadRequest) -> AsyncIterator[ReadAnswer]:
        for entry_id in range(request.first_entry_id, request.last_entry_id + 1):
            await asyncio.sleep(0.001)
            yield ReadAnswer((encode_group(1, entry_id, -1, 0, [b"x"]),), (), entry_id + 1)

    async def write_lac(self, request: ExplicitLac) -> Status:
        return Status.OK


class Source:
    """An `AddSource` with numbered entries to send."""

    def __init__(self) -> None:
        self.waiting: deque[int] = deque()
        self.answered: list[int] = []
        self.statuses: list[Status] = []
        self.broken: BaseException | None = None

    def next_message(self, max_bytes: int) -> Sequence[AddRequest]:
        message = [AddRequest(encode_group(1, entry_id, -1, 0, [b"x"]), KEY) for entry_id in self.waiting]
        self.waiting.clear()
        return message

    def on_answers(self, answers: Sequence[AddAnswer]) -> None:
        self.answered.extend(answer.first_entry_id for answer in answers)
        self.statuses.extend(answer.status for answer in answers)

    def on_broken(self, error: BaseException) -> None:
        assert self.broken is None, "told twice"
        self.broken = error


class Pair:
    def __init__(self, faults: Faults = CALM, seed: str = "1") -> None:
        self.plan = FaultPlan(seed, faults)
        self.network = Network(self.plan)
        self.client, self.server, self.bookie = Node("broker"), Node("b1"), EchoBookie()
        self.network.serve("b1", self.server, self.bookie)
        self.connection = SimConnections(self.network, self.client).get("b1")
        self.source = Source()

    def send(self, *entry_ids: int) -> SimAddStream:
        stream = self.connection.open_add_stream(self.source)
        self.more(stream, *entry_ids)
        return stream

    def more(self, stream: SimAddStream, *entry_ids: int) -> None:
        self.source.waiting.extend(entry_ids)
        stream.wake()


async def test_a_stream_keeps_its_order() -> None:
    pair = Pair()
    stream = pair.send(0)
    for entry_id in range(1, 50):
        await asyncio.sleep(0.0003)
        pair.more(stream, entry_id)
    await asyncio.sleep(1)
    assert pair.bookie.added == pair.source.answered == list(range(50))


async def test_calls_and_chunks_arrive() -> None:
    pair = Pair()
    assert (await pair.connection.read_lac(LacRequest(1, KEY))).last_add_confirmed == 7
    assert await pair.connection.write_lac(ExplicitLac(1, 3, KEY)) is Status.OK
    chunks = [chunk.next_entry_id async for chunk in pair.connection.read(ReadRequest(1, 0, 9))]
    assert chunks == list(range(1, 11))


async def test_a_reader_that_stops_ends_the_work_at_the_bookie() -> None:
    pair = Pair()
    chunks = pair.connection.read(ReadRequest(1, 0, 10**6))
    assert (await anext(chunks)).next_entry_id == 1
    await chunks.aclose()  # type: ignore[attr-defined]
    await asyncio.sleep(1)
    assert [task for task in asyncio.all_tasks() if "serve" in task.get_name()] == []


async def test_a_dead_process_resets_and_a_dead_machine_is_silent() -> None:
    for noticed, least_s in ((True, 0.0), (False, CALM.silence_s)):
        pair = Pair()
        pair.send(0)
        await asyncio.sleep(1)
        pair.server.crash()
        began = asyncio.get_running_loop().time()
        pair.network.stop_serving("b1", noticed=noticed)
        await wait_until(lambda pair=pair: pair.source.broken is not None)
        assert least_s <= asyncio.get_running_loop().time() - began <= least_s + 0.02
        with pytest.raises(BookieUnavailableError):
            await pair.connection.read_lac(LacRequest(1, KEY))


async def test_a_short_partition_delays_and_a_long_one_breaks() -> None:
    pair = Pair()
    stream = pair.send(0)
    await asyncio.sleep(1)
    pair.network.block("broker", "b1")
    pair.more(stream, 1)
    await asyncio.sleep(1)
    assert pair.bookie.added == [0]
    pair.network.heal()
    pair.more(stream, 2)
    await asyncio.sleep(1)
    assert pair.source.answered == [0, 1, 2]
    pair.network.block("b1", "broker")
    pair.more(stream, 3)
    await asyncio.sleep(10)
    assert pair.bookie.added == [0, 1, 2, 3], "it got there"
    assert pair.source.answered == [0, 1, 2], "and nobody was told"
    assert pair.source.broken is not None


def test_a_reset_after_the_server_acted_loses_the_answer() -> None:
    fates = set()

    async def main(seed: int) -> None:
        pair = Pair(Faults(reset=0.3).without("loss", "late", "duplicate"), str(seed))
        try:
            await pair.connection.read_lac(LacRequest(1, KEY))
        except BookieUnavailableError:
            fates.add(("broken", pair.bookie.calls))
        else:
            fates.add(("answered", pair.bookie.calls))

    for seed in range(40):
        run_simulated(main(seed))
    assert fates == {("answered", 1), ("broken", 0), ("broken", 1)}


async def test_duplicates_come_late_and_answer_nobody() -> None:
    pair = Pair(Faults(duplicate=1.0).without("loss", "late", "reset", "corrupt"))
    pair.send(0, 1)
    await asyncio.sleep(10)
    assert pair.bookie.added == [0, 1, 0, 1]
    assert pair.source.answered == [0, 1]


async def test_a_flipped_bit_is_refused_at_the_bookies_door() -> None:
    pair = Pair(Faults(corrupt=1.0).without("loss", "late", "reset", "duplicate"))
    pair.send(0)
    await asyncio.sleep(1)
    assert pair.bookie.added == []
    assert pair.source.statuses == [Status.BAD_DIGEST]


async def test_a_receiver_that_does_not_read_holds_up_the_stream_and_loses_nothing() -> None:
    pair = Pair(replace(CALM, slow_receiver=1.0, slow_receiver_s=(2.0, 2.0)))
    stream = pair.send(0)
    await asyncio.sleep(0.5)
    pair.more(stream, 1, 2)
    await asyncio.sleep(1)
    assert pair.bookie.added == []
    await asyncio.sleep(5)
    assert pair.bookie.added == pair.source.answered == [0, 1, 2]
    assert pair.plan.counts["slow receiver"] >= 2


async def test_a_bit_of_an_answer_flips_and_its_digest_says_so() -> None:
    pair = Pair(replace(CALM, corrupt_answer=1.0))
    chunks = [chunk async for chunk in pair.connection.read(ReadRequest(1, 0, 4))]
    assert len(chunks) == 5
    for chunk in chunks:
        with pytest.raises((DigestMismatchError, MalformedGroupError)):
            chunk.groups[0].verify()
