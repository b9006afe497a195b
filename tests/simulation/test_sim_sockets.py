"""Sockets of the simulated network keep what TCP and asyncio promise, and break what they may break."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from tests.simulation.faults.plan import CALM, FaultPlan, Faults
from tests.simulation.world.node import Node, current_node
from tests.simulation.world.sim_network import Network
from tests.simulation.world.sim_sockets import Sockets
from tests.simulation.world.sim_transport import SimTransport
from tests.simulation.world.virtual_loop import VirtualLoop
from tests.support import wait_until


class Peer(asyncio.Protocol):
    """Remembers what it heard, and in which process."""

    def __init__(self) -> None:
        self.heard = b""
        self.reads = 0
        self.lost: list[Exception | None] = []
        self.ended = self.paused = False
        self.nodes: dict[Node | None, None] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(SimTransport, transport)
        self.nodes[current_node()] = None

    def data_received(self, data: bytes) -> None:
        self.heard += data
        self.reads += 1
        self.nodes[current_node()] = None

    def eof_received(self) -> bool:
        self.ended = True
        return False

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)
        self.nodes[current_node()] = None


class Set:
    """A server's process "east", and the machine "anna" outside of processes."""

    def __init__(self, faults: Faults, seed: str) -> None:
        self.loop = VirtualLoop(max_steps=200_000)
        self.plan = FaultPlan(seed, faults)
        self.network = Network(self.plan)
        self.sockets = self.loop.sockets = Sockets(self.loop, self.network)
        self.east = Node("east")
        self.served: list[Peer] = []

    async def listen(self, node: Node | None = None) -> Any:
        return await (node or self.east).start(self.loop.create_server(self._serve, "east", 6650), name="listen")

    async def listen_at(self, node: Node, host: str) -> Any:
        return await node.start(self.loop.create_server(Peer, host, 6650), name="listen")

    def _serve(self) -> Peer:
        self.served.append(Peer())
        return self.served[-1]

    async def connect(self, machine: str = "anna") -> Peer:
        _, protocol = await self.loop.create_connection(Peer, "east", 6650, local_addr=(machine, 0))
        return cast(Peer, protocol)

    async def pair(self) -> tuple[Peer, Peer]:
        """Client and server."""
        if not self.served:
            await self.listen()
        count = len(self.served)
        client = await self.connect()
        await wait_until(lambda: len(self.served) > count)
        return client, self.served[-1]


def play(script: Callable[[Set], Awaitable[None]], faults: Faults = CALM, seed: str = "sockets") -> Set:
    scene = Set(faults, seed)
    scene.loop.run(script(scene))  # type: ignore[arg-type]
    return scene


def test_bytes_arrive_whole_and_in_order_both_ways_in_the_steps_of_their_process() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        sent = [bytes([number]) * (number * 7) for number in range(200)]
        for data in sent:
            client.transport.write(data)
            server.transport.writelines([data, b"|"])
            await asyncio.sleep(0.0001 if len(data) % 3 else 0.0)
        await wait_until(lambda: client.heard == b"|".join(sent) + b"|" and server.heard == b"".join(sent))
        client.transport.close()
        await wait_until(lambda: server.lost and client.lost)
        assert (client.lost, server.lost, server.ended) == ([None], [None], True)
        assert (list(client.nodes), list(server.nodes)) == ([None], [scene.east])

    play(script, Faults().without("loss", "reset"))


def test_names_of_both_ends() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        assert client.transport.get_extra_info("peername") == ("east", 6650)
        assert server.transport.get_extra_info("sockname") == ("east", 6650)
        assert server.transport.get_extra_info("peername") == client.transport.get_extra_info("sockname")
        assert client.transport.get_extra_info("sockname")[0] == "anna"

    play(script)


def test_what_is_written_before_a_close_arrives() -> None:
    async def script(scene: Set) -> None:
        scene.sockets.window_bytes = 100
        client, server = await scene.pair()
        client.transport.write(bytes(1000))
        client.transport.close()
        client.transport.write(b"too late")
        await wait_until(lambda: server.lost and client.lost)
        assert server.heard == bytes(1000)
        assert server.ended

    play(script)


def test_a_receiver_that_does_not_read_pauses_the_writer_and_holds_nobody_else_up() -> None:
    async def script(scene: Set) -> None:
        scene.sockets.window_bytes = 1000
        client, server = await scene.pair()
        other, other_server = await scene.pair()
        client.transport.pause_reading()
        server.transport.set_write_buffer_limits(500)
        server.transport.write(bytes(1400))
        assert not server.paused
        assert server.transport.get_write_buffer_size() == 400
        server.transport.write(bytes(200))
        assert server.paused
        other_server.transport.write(b"hello")
        await wait_until(lambda: other.heard == b"hello")
        await asyncio.sleep(10)
        assert client.heard == b""
        assert server.paused
        client.transport.resume_reading()
        await wait_until(lambda: len(client.heard) == 1600)
        await wait_until(lambda: not server.paused)
        assert server.transport.get_write_buffer_size() == 0

    play(script)


def test_refused_where_nobody_listens_and_at_a_taken_port() -> None:
    async def script(scene: Set) -> None:
        with pytest.raises(ConnectionRefusedError):
            await scene.connect()
        server = await scene.listen()
        with pytest.raises(OSError, match="6650"):
            await scene.listen()
        client = await scene.connect()
        server.close()
        with pytest.raises(ConnectionRefusedError):
            await scene.connect()
        scene.served[0].transport.write(b"still here")  # connections outlive their listener
        await wait_until(lambda: client.heard == b"still here")
        await scene.listen()
        await scene.connect()

    play(script)


def test_a_crashed_process_closes_its_connections_and_takes_no_step() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        server.transport.write(b"last words")
        client.transport.write(b"for nobody")
        scene.east.crash()
        await wait_until(lambda: client.lost)
        assert client.heard == b"last words"
        assert client.ended
        assert (server.heard, server.lost) == (b"", [])
        with pytest.raises(ConnectionRefusedError):
            await scene.connect()
        await scene.listen(Node("east", 2))
        await scene.connect()

    play(script)


def test_a_machine_without_power_says_nothing_and_resets_what_comes_once_it_is_back() -> None:
    async def script(scene: Set) -> None:
        client, _ = await scene.pair()
        scene.sockets.lose_power("east")
        scene.east.crash()
        client.transport.write(b"anybody?")
        with pytest.raises(TimeoutError):
            await scene.connect()
        await asyncio.sleep(100)
        assert client.lost == []
        await scene.listen(Node("east", 2))
        client.transport.write(b"and now?")
        await wait_until(lambda: client.lost)
        assert isinstance(client.lost[0], ConnectionResetError)

    play(script)


def test_a_paused_process_is_connected_to_and_hears_of_it_when_it_resumes() -> None:
    async def script(scene: Set) -> None:
        await scene.listen()
        scene.east.pause()
        client = await scene.connect()
        client.transport.write(b"hello")
        await asyncio.sleep(5)
        assert scene.served == []
        scene.east.resume()
        await wait_until(lambda: bool(scene.served) and scene.served[0].heard == b"hello")
        scene.served[0].transport.write(b"late")
        await wait_until(lambda: client.heard == b"late")

    play(script)


def test_a_partition_holds_bytes_back_in_one_direction_and_lets_them_through_in_order() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        scene.network.block("anna", "east")
        for number in range(5):
            client.transport.write(bytes([number]))
            await asyncio.sleep(0.01)
        server.transport.write(b"can you hear me")
        await wait_until(lambda: client.heard == b"can you hear me")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await scene.connect()
        assert server.heard == b""
        scene.network.unblock("anna", "east")
        client.transport.write(bytes([5]))
        await wait_until(lambda: len(server.heard) == 6)
        assert server.heard == bytes(range(6))
        await wait_until(lambda: len(scene.served) == 1)  # who gave up is not connected later

    play(script)


def test_whoever_gives_up_while_the_answer_is_on_its_way_leaves_no_connection() -> None:
    async def script(scene: Set) -> None:
        await scene.listen()
        scene.network.block("east", "anna")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await scene.connect()
        assert len(scene.served) == 1
        scene.network.unblock("east", "anna")
        await wait_until(lambda: scene.served[0].lost)
        assert scene.sockets.ends_at("anna") == scene.sockets.ends_at("east") == []

    play(script)


def test_a_reset_before_the_server_acted_loses_the_bytes_and_one_after_it_loses_the_answer() -> None:
    async def script(scene: Set) -> None:
        for _ in range(40):
            client, server = await scene.pair()
            client.transport.write(b"do it")
            await wait_until(lambda c=client, s=server: s.heard or c.lost)
            if server.heard:
                server.transport.write(b"done")
                await wait_until(lambda c=client: c.heard or c.lost)
            outcomes.append((bool(server.heard), bool(client.heard)))
            if client.lost:
                assert isinstance(client.lost[0], ConnectionResetError)
                await wait_until(lambda s=server: s.lost)

    outcomes: list[tuple[bool, bool]] = []
    scene = play(script, Faults(reset=0.3).without("loss", "slow_receiver"))
    kinds = scene.plan.counts
    assert outcomes.count((False, False)) == kinds["connection reset before the server acted"] > 0
    assert outcomes.count((True, False)) == kinds["connection reset after the server acted"] > 0
    assert outcomes.count((True, True)) > 0


def test_a_half_open_connection_is_silent_for_ever_and_fills_the_writer() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        client.transport.write(bytes(100))
        await asyncio.sleep(1000)
        assert (client.lost, server.lost, server.heard) == ([], [], b"")
        client.transport.write(bytes(200_000))
        assert client.paused
        client.transport.abort()
        await wait_until(lambda: client.lost)
        assert server.lost == []

    scene = play(script, Faults(loss=1.0))
    assert scene.plan.counts["connection half-open"] == 1


def test_all_connections_of_a_machine_are_reset_together_and_no_others() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        await scene.listen_at(Node("west"), "west")
        _, other = await scene.loop.create_connection(Peer, "west", 6650, local_addr=("anna", 0))
        server.transport.write(b"on its way")
        scene.sockets.reset("east")
        client.transport.write(b"too late")
        await wait_until(lambda: client.lost and server.lost)
        assert client.heard == b"on its way"
        assert (server.heard, other.lost) == (b"", [])
        assert isinstance(client.lost[0], ConnectionResetError)
        assert isinstance(server.lost[0], ConnectionResetError)

    play(script)


def test_a_process_that_is_busy_reads_later_and_all_at_once() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        server.transport.sleep(5.0)
        for _ in range(10):
            client.transport.write(b"more ")
            await asyncio.sleep(0.1)
        assert server.heard == b""
        await wait_until(lambda: server.heard == b"more " * 10)
        assert server.reads == 1

    play(script)


def test_who_does_not_read_hears_of_a_reset_by_writing() -> None:
    async def script(scene: Set) -> None:
        client, server = await scene.pair()
        server.transport.pause_reading()
        client.transport.write(b"unread")
        await asyncio.sleep(1)
        scene.east.crash()  # it leaves unread bytes behind
        client.transport.pause_reading()
        await asyncio.sleep(10)
        assert client.lost == []
        client.transport.write(b"hello?")
        await wait_until(lambda: client.lost)
        assert isinstance(client.lost[0], ConnectionResetError)

    play(script)


def test_streams_of_asyncio_work_on_it() -> None:
    async def script(scene: Set) -> None:
        await scene.listen()
        reader, writer = await asyncio.open_connection("east", 6650)
        await wait_until(lambda: bool(scene.served))
        writer.write(b"ask\n")
        await writer.drain()
        scene.served[0].transport.write(b"answer\n")
        assert await reader.readline() == b"answer\n"
        writer.close()
        await writer.wait_closed()
        await wait_until(lambda: scene.served[0].heard == b"ask\n" and scene.served[0].lost)

    play(script)


def test_the_same_seed_gives_the_same_course() -> None:
    def course() -> list[object]:
        seen: list[object] = []

        async def script(scene: Set) -> None:
            for number in range(60):
                client, server = await scene.pair()
                for _ in range(10):
                    client.transport.write(bytes(number))
                    await asyncio.sleep(0.01)
                seen.append((scene.loop.time(), len(server.heard), server.reads, bool(client.lost)))

        scene = play(script, Faults(loss=0.01, reset=0.01, late=0.1, pieces=0.1, slow_receiver=0.05), "seed")
        return [*seen, scene.plan.counts]

    first = course()
    assert first == course()
    assert len(cast(dict[str, int], first[-1])) >= 5
