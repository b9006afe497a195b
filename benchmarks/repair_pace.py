"""What do the copies that repair makes on a bookie cost other writers? And how fast are they, beside writes and without?

One bookie in this process, on a real disk. Writes alone and writes beside copies take turns, so that what else the machine does is
in both.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.report import percentile, print_line

KEY = b"k" * 16
COPIED_ENTRY_BYTES = 16_000
GROUP_ENTRIES = 60  # of copies: about 1 MB, a message
GROUPS_PER_LEDGER = 10
REPEAT_S = 0.02
WARMUP_S = 1.0


class AddsRefusedError(Exception):
    """A write was not stored: the run has no figure."""


async def publish(bookie: Any, ledger_id: int, rate: float, entry_bytes: int, seconds: float) -> list[float]:
    """Evenly paced adds of one entry each; returns how long each took from when it was due, without those of the warm-up."""
    from cepheid_rpc import AddRequest, Status, encode_group

    payload = bytes(entry_bytes)
    took_s: list[float] = []
    answered = asyncio.Event()
    refused: list[Any] = []
    count = int(rate * (WARMUP_S + seconds))
    waiting = 0
    started = time.perf_counter()

    def on_answers(answers: Sequence[Any], due: float) -> None:
        nonlocal waiting
        refused.extend(answer for answer in answers if answer.status is not Status.OK)
        took_s.append(time.perf_counter() - due)
        waiting -= 1
        if not waiting:
            answered.set()

    for number in range(count):
        due = started + number / rate
        while time.perf_counter() < due:  # noqa: ASYNC110 - the clock sets no event
            await asyncio.sleep(0.0005)
        waiting += 1
        answered.clear()
        group = encode_group(ledger_id, number, number - 1, number * entry_bytes, [payload])
        bookie.add([AddRequest(group, KEY)], lambda answers, due=due: on_answers(answers, due))
    await asyncio.wait_for(answered.wait(), 30)
    if refused:
        raise AddsRefusedError(f"{len(refused)} ranges of writes were refused, first {refused[0]}")
    return took_s[int(rate * WARMUP_S) :]


class Copier:
    """Keeps background adds under way, as replication workers do: what is refused is sent again."""

    def __init__(self, bookie: Any, in_flight_bytes: int) -> None:
        self._bookie = bookie
        self._in_flight_bytes = in_flight_bytes
        self._next = 0
        self._under_way = 0
        self._running = False
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @contextmanager
    def running(self) -> Iterator[None]:
        self._running = True
        self._send_more()
        yield
        self._running = False

    async def wait_idle(self) -> None:
        while self._under_way:
            await load.run_unless_failed(self.failed, 0.05)

    def _send_more(self) -> None:
        from cepheid_rpc import AddRequest, encode_group

        while self._running and self._under_way < self._in_flight_bytes:
            ledger_id, place = 1_000_000 + self._next // GROUPS_PER_LEDGER, self._next % GROUPS_PER_LEDGER
            self._next += 1
            first = place * GROUP_ENTRIES
            payloads = [bytes(COPIED_ENTRY_BYTES)] * GROUP_ENTRIES
            group = encode_group(ledger_id, first, -1, first * COPIED_ENTRY_BYTES, payloads)
            self._under_way += group.size_bytes
            self._send(AddRequest(group, KEY, recovery=True, background=True))

    def _send(self, request: Any) -> None:
        from cepheid_rpc import Status

        unanswered, refused = len(request.group), False

        def on_answers(answers: Sequence[Any]) -> None:
            nonlocal unanswered, refused
            for answer in answers:
                unanswered -= answer.last_entry_id - answer.first_entry_id + 1
                refused = refused or answer.status is Status.OVERLOADED
                if answer.status not in (Status.OK, Status.OVERLOADED) and not self.failed.done():
                    self.failed.set_exception(AddsRefusedError(f"a copy was refused: {answer}"))
            if unanswered:
                return
            if refused and self._running:
                asyncio.get_running_loop().call_later(REPEAT_S, self._send, request)
                return
            self._under_way -= request.group.size_bytes
            self._send_more()

        self._bookie.add([request], on_answers)


async def measure(directory: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    from cepheid_bookie import Bookie, BookieIdentity, RealDisk, StorageSettings
    from cepheid_bookie.rocks_index import RocksBlockIndex
    from cepheid_ports import Ports

    disk, index = RealDisk(directory / "bookie"), RocksBlockIndex(directory / "index")
    bookie = await Bookie.open(BookieIdentity("bench-bookie"), StorageSettings(), disk, index, Ports())
    copier = Copier(bookie, arguments.in_flight_bytes)
    alone: list[list[float]] = []
    beside: list[list[float]] = []
    copied_mb_per_s: list[float] = []
    slowdowns = 0
    try:
        for pair in range(arguments.pairs):
            alone.append(await publish(bookie, 2 * pair, arguments.rate, arguments.entry_bytes, arguments.seconds))
            before, started = bookie.statistics(), time.perf_counter()
            with copier.running():
                beside.append(await publish(bookie, 2 * pair + 1, arguments.rate, arguments.entry_bytes, arguments.seconds))
                after = bookie.statistics()
                seconds = time.perf_counter() - started
            copied_mb_per_s.append((after.background_bytes_added - before.background_bytes_added) / 1e6 / seconds)
            slowdowns += after.background_slowdowns - before.background_slowdowns
            await copier.wait_idle()
            await bookie.checkpoint()
        copied, started = bookie.statistics().background_bytes_added, time.perf_counter()
        with copier.running():
            await load.run_unless_failed(copier.failed, arguments.seconds)
            idle_mb_per_s = (bookie.statistics().background_bytes_added - copied) / 1e6 / (time.perf_counter() - started)
        await copier.wait_idle()
    finally:
        copier.failed.cancel()
        await bookie.aclose()
    p99_s = [(percentile(a, 0.99), percentile(b, 0.99)) for a, b in zip(alone, beside, strict=True)]
    return {
        # Within the bar: at most half as much again, or 2 ms more.
        "p99_excess_ms": round(1000 * percentile([max(0.0, bad - max(1.5 * good, good + 0.002)) for good, bad in p99_s], 0.5), 3),
        "ratio": round(percentile([bad / good for good, bad in p99_s], 0.5), 3),
        "alone_ms_p50": round(1000 * percentile([percentile(values, 0.5) for values in alone], 0.5), 3),
        "beside_ms_p50": round(1000 * percentile([percentile(values, 0.5) for values in beside], 0.5), 3),
        "alone_ms_p99": round(1000 * percentile([good for good, _ in p99_s], 0.5), 3),
        "beside_ms_p99": round(1000 * percentile([bad for _, bad in p99_s], 0.5), 3),
        "pairs_ms_p50": [
            [round(1000 * percentile(a, 0.5), 2), round(1000 * percentile(b, 0.5), 2)] for a, b in zip(alone, beside, strict=True)
        ],
        "pairs_ms_p99": [[round(1000 * value, 2) for value in pair] for pair in p99_s],
        "copied_mb_per_s": round(percentile(copied_mb_per_s, 0.5), 1),
        "idle_copied_mb_per_s": round(idle_mb_per_s, 1),
        "slowdowns": slowdowns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="entries a second, evenly spaced")
    parser.add_argument("--entry-bytes", type=int, default=1000)
    parser.add_argument("--in-flight-bytes", type=int, default=8 << 20, help="copies always under way")
    parser.add_argument("--data", help="parent directory of the bookie's data")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cepheid-bench-", dir=arguments.data) as directory:
        figures = load.run(measure(Path(directory), arguments))
    print_line(
        "repair_pace",
        figures=figures,
        load={
            "pairs": arguments.pairs,
            "entries_per_s": arguments.rate,
            "entry_bytes": arguments.entry_bytes,
            "in_flight_bytes": arguments.in_flight_bytes,
            "copied_entry_bytes": COPIED_ENTRY_BYTES,
            "seconds": arguments.seconds,
        },
        settings={"bookie": "in this process", "settings": "default"},
    )


if __name__ == "__main__":
    main()
