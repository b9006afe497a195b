"""The queue of all writers of this process to one bookie, with entries of many ledgers, and the answers to them.

    LedgerWriter ──send──► Lane (one per writer) ─┐
    LedgerWriter ──send──► Lane ──────────────────┼──next_message──► transport ──► bookie
    Recovery     ──send──► Lane ──────────────────┘                     │
         ▲                   └── sent, unanswered ◄──────on_answers─────┘
         └──── on_added / on_add_failed / on_refused_for_good

Rules:
1. The transport pulls: requests that arrive while a message is in flight are sent together in the next one, small groups as one.
2. A lane's entries are sent and answered in order, so "holds everything up to n" is one number. The stream of a peer that answers
   anything else is dropped.
3. A bookie that is overloaded or full gets the refused entries *and all after them* again, until `refusal_retry_s` is over.
4. One timer per channel finds lanes without progress. A stream without any progress is dropped as a whole.
5. A dropped stream leaves the outcome of unanswered entries unknown: these lanes have failed. What was not sent yet waits for
   the next stream.
6. The queue is bounded: lanes that can do without this bookie are given up when the window is full, at the latest a quarter
   above it. The others are bounded by what their callers may have unconfirmed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cepheid_ledger.channel_stream import ChannelStream, Unanswered
from cepheid_ledger.errors import BookieProtocolError
from cepheid_ledger.lane import Lane, LaneListener, LeftLane, merge_small
from cepheid_ledger.settings import LedgerSettings
from cepheid_ports import TaskOwner
from cepheid_rpc import AddAnswer, AddRequest, BookieConnection, BookieUnavailableError, Status

log = logging.getLogger(__name__)

_FATAL = (Status.FENCED, Status.UNAUTHORIZED)
_WORTH_REPEATING = (Status.OVERLOADED, Status.NO_SPACE)
_TICKS_PER_TIMEOUT = 4
_REQUEST_BYTES = 512
"""Memory of a waiting request besides its entries: small ones would fill the memory long before their bytes fill the window."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Statistics of a channel. `waiting_bytes`: queued and unanswered, including the memory of the requests themselves."""

    lanes: int
    waiting_bytes: int
    requests_sent: int
    streams_opened: int
    streams_broken: int
    lanes_failed: int
    refusals: int


class BookieChannel:
    def __init__(self, bookie_id: str, connection_of: Callable[[str], BookieConnection], settings: LedgerSettings) -> None:
        self.bookie_id = bookie_id
        self._connection_of = connection_of  # called for each stream: a bookie may return at another address
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._tasks = TaskOwner(f"channel {self.bookie_id}")
        self._stream: ChannelStream | None = None
        self._lanes: dict[Lane, None] = {}
        self._left = 0  # lanes of writers that are done
        self._none_left = asyncio.Event()
        self._ready: deque[Lane] = deque()  # lanes with a queue
        self._waiting_bytes = 0
        self._window_check_bytes = settings.channel_window_bytes
        self._tick = self._answered_at_tick = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._reopener: asyncio.TimerHandle | None = None
        self._repeaters: dict[Lane, asyncio.TimerHandle] = {}
        self._reopen_delay_s = settings.reconnect_delay_s
        self._requests_sent = self._streams_opened = self._streams_broken = self._lanes_failed = self._refusals = 0
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._stream is not None else "without stream"
        return f"<BookieChannel {self.bookie_id} {state}: {len(self._lanes)} lanes, {self._waiting_bytes} B waiting>"

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            lanes=len(self._lanes),
            waiting_bytes=self._waiting_bytes,
            requests_sent=self._requests_sent,
            streams_opened=self._streams_opened,
            streams_broken=self._streams_broken,
            lanes_failed=self._lanes_failed,
            refusals=self._refusals,
        )

    def open_lane(self, ledger_id: int, listener: LaneListener) -> Lane:
        assert not self._closed, f"{self!r} takes no writers"
        lane = Lane(ledger_id, listener)
        self._lanes[lane] = None
        return lane

    def send(self, lane: Lane, request: AddRequest) -> None:
        """Queue one group. A closed lane drops it: its listener has been notified of the reason."""
        if lane.closed:
            return
        self._waiting_bytes += len(request.group.data) + _REQUEST_BYTES
        if lane.refused is None and not lane.queue:
            if not lane.unanswered:
                lane.seen = self._tick
            self._ready.append(lane)
        lane.queue.append(request)
        if self._stream is not None:
            self._stream.wake()
        elif self._reopener is None:
            self._open_stream()
        if self._ticker is None:
            self._start_ticker()
        if self._waiting_bytes > self._window_check_bytes:
            self._relieve_window()

    def close_lane(self, lane: Lane) -> None:
        """Drop what was not sent; answers to the rest are ignored."""
        if lane.closed:
            return
        lane.closed = True
        del self._lanes[lane]
        self._left -= lane.left
        if not self._left:
            self._none_left.set()
        self._waiting_bytes -= _size(lane.queue) + _size(lane.refused or ())
        lane.queue.clear()  # `_ready` may still hold the lane: an empty one is skipped
        lane.refused = None
        if (timer := self._repeaters.pop(lane, None)) is not None:
            timer.cancel()

    def leave_lane(self, lane: Lane, on_missed: Callable[[str], None]) -> None:
        """Detach a writer that is done. What is queued is still sent, since Qa copies are not yet all copies.

        `on_missed` is called with the bookie's id if it fails first, or the channel is closed.
        """
        if not lane.waits:
            self.close_lane(lane)
        elif not lane.closed:
            lane.listener = LeftLane(on_missed)
            lane.left = True
            self._left += 1
            self._none_left.clear()

    async def settle(self, timeout_s: float) -> None:
        """Wait until the bookie has taken what writers that are done have left, but no longer than this; then give the rest up."""
        if not self._left:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._none_left.wait()
        except TimeoutError:
            self._fail([lane for lane in self._lanes if lane.left], f"had entries to answer after {timeout_s:g} s")

    async def aclose(self) -> None:
        """Fail all lanes. Connections belong to the caller that provided them."""
        self._closed = True
        for timer in (self._ticker, self._reopener):
            if timer is not None:
                timer.cancel()
        self._ticker = self._reopener = None
        self._fail(list(self._lanes), "the ledger client was closed")
        stream = self._stream
        if stream is not None:
            self._detach(stream)
            if stream.transport is not None:
                await stream.transport.aclose()
        await self._tasks.aclose()

    # Calls of the transport

    def next_message(self, stream: ChannelStream, max_bytes: int) -> Sequence[AddRequest]:
        message: list[AddRequest] = []
        ready = self._ready
        while ready and max_bytes > 0:
            lane = ready.popleft()
            if lane.refused is not None or not lane.queue:
                continue
            queued = lane.take(max_bytes)
            taken = merge_small(queued)
            self._waiting_bytes -= (len(queued) - len(taken)) * _REQUEST_BYTES
            unanswered = stream.sent.get(lane.ledger_id)
            if unanswered is None:
                unanswered = stream.sent[lane.ledger_id] = Unanswered()
            for request in taken:
                group = request.group
                unanswered.items.append((group.first_entry_id + len(group.ends) - 1, lane, request))
                max_bytes -= len(group.data)
            lane.unanswered += len(taken)
            message += taken
            if lane.queue:
                ready.append(lane)
        self._requests_sent += len(message)
        return message

    def on_answers(self, stream: ChannelStream, answers: Sequence[AddAnswer]) -> None:
        self._answered_at_tick = self._tick
        for answer in answers:
            if not self._take(stream, answer):
                self.drop_stream(BookieProtocolError(f"bookie {self.bookie_id} answered {answer}, which it was not asked"))
            if self._stream is not stream:
                return
        self._lower_window_check()

    def drop_stream(self, error: BaseException) -> None:
        stream = self._stream
        if stream is None:
            return
        failed = self._detach(stream)
        if stream.transport is not None:
            self._tasks.start(stream.transport.aclose(), name="close-stream")
        self._reopen_later(error)
        self._fail(failed, f"lost its connection: {error}")

    def _open_stream(self) -> None:
        self._streams_opened += 1
        stream = self._stream = ChannelStream(self)
        try:
            transport = self._connection_of(self.bookie_id).open_add_stream(stream)
        except BookieUnavailableError as error:
            self._detach(stream)
            self._reopen_later(error)
            return
        if self._stream is stream:
            stream.transport = transport
            transport.wake()
        else:  # it broke while being opened
            self._tasks.start(transport.aclose(), name="close-stream")

    def _reopen_later(self, error: BaseException) -> None:
        self._streams_broken += 1
        log.warning("bookie.stream_broken", extra={"bookie": self.bookie_id, "error": repr(error)})
        self._reopener = self._loop.call_later(self._reopen_delay_s, self._reopen)
        self._reopen_delay_s = min(2 * self._reopen_delay_s, self._settings.reconnect_delay_max_s)

    def _reopen(self) -> None:
        self._reopener = None
        self._ready = deque(lane for lane in self._ready if lane.queue)  # without a stream, closed lanes were not removed
        if self._ready:
            self._open_stream()

    def reopen_now(self) -> None:
        """Reopen the stream without the rest of the pause, as the bookie is back."""
        self._reopen_delay_s = self._settings.reconnect_delay_s
        if self._reopener is not None:
            self._reopener.cancel()
            self._reopen()

    def _detach(self, stream: ChannelStream) -> Iterable[Lane]:
        """Cut the stream off; return the lanes that had unanswered requests on it."""
        stream.owner = self._stream = None
        lanes: dict[Lane, None] = {}
        for unanswered in stream.sent.values():
            for _, lane, request in unanswered.items:
                lanes[lane] = None
                lane.unanswered -= 1
                self._waiting_bytes -= len(request.group.data) + _REQUEST_BYTES
        stream.sent.clear()
        self._lower_window_check()
        return lanes

    # Answers

    def _take(self, stream: ChannelStream, answer: AddAnswer) -> bool:
        """Process an answer. False: it does not answer what was sent next."""
        unanswered = stream.sent.get(answer.ledger_id)
        if unanswered is None or not unanswered.is_next(answer):
            return False
        items, last, status = unanswered.items, answer.last_entry_id, answer.status
        while True:
            item_last, lane, request = items[0]
            if status in _WORTH_REPEATING and lane.refused is None and not lane.closed:
                self._refusals += 1
                lane.start_refusal(self._loop.time(), self._settings.refusal_delay_s)
            if last < item_last:  # a part of the request; it stays until the rest is answered
                unanswered.next_entry_id = last + 1
                self._report(lane, status, last)
                return True
            items.popleft()
            unanswered.next_entry_id = -1
            lane.unanswered -= 1
            if lane.refused is not None:
                lane.refused.append(request)
            else:
                self._waiting_bytes -= len(request.group.data) + _REQUEST_BYTES
            done = item_last >= last
            if done and not items:
                del stream.sent[answer.ledger_id]
            if done or items[0][1] is not lane:
                self._report(lane, status, item_last)
                if done or self._stream is not stream:
                    return True

    def _report(self, lane: Lane, status: Status, reached: int) -> None:
        if lane.closed:
            return
        lane.seen = self._tick
        if status is Status.OK and lane.refused is None:
            lane.refused_since = None
            if reached > lane.acked_through:  # otherwise a part of something repeated
                lane.acked_through = reached
                lane.listener.on_added(self.bookie_id, reached)
            if lane.left and not lane.waits:
                self.close_lane(lane)
        elif status is Status.OK or status in _WORTH_REPEATING:
            if lane.unanswered == 0:
                self._repeat_later(lane)
        elif status in _FATAL:
            self.close_lane(lane)
            lane.listener.on_refused_for_good(self.bookie_id, status)
        else:
            self._fail([lane], f"answered {status.name}")

    def _repeat_later(self, lane: Lane) -> None:
        assert lane.refused_since is not None
        if self._loop.time() - lane.refused_since > self._settings.refusal_retry_s:
            self._fail([lane], f"refused entries for {self._settings.refusal_retry_s:g} s")
        elif lane not in self._repeaters:
            self._repeaters[lane] = self._loop.call_later(lane.delay_s, self._repeat, lane)

    def _repeat(self, lane: Lane) -> None:
        del self._repeaters[lane]
        lane.repeat()
        lane.seen = self._tick
        self._ready.append(lane)
        if self._stream is not None:
            self._stream.wake()
        elif self._reopener is None:
            self._open_stream()

    # Failures and time

    def _fail(self, lanes: Iterable[Lane], reason: str) -> None:
        for lane in lanes:
            if not lane.closed:
                self.close_lane(lane)
                self._lanes_failed += 1
                lane.listener.on_add_failed(self.bookie_id, reason)

    def _relieve_window(self) -> None:
        limit = self._settings.channel_window_bytes
        spare = [lane for lane in self._lanes if lane.waits and lane.listener.can_do_without(self.bookie_id)]
        self._fail(spare, f"has more than {limit} bytes to answer")
        # Checked again a quarter higher: a full window of lanes that need this bookie must not cost a scan per append.
        self._window_check_bytes = limit if self._waiting_bytes <= limit else self._waiting_bytes + limit // 4

    def _lower_window_check(self) -> None:
        """Lower the limit that was raised for lanes that need this bookie: the next to fill the window may be others."""
        limit = self._settings.channel_window_bytes
        if self._window_check_bytes > limit:
            self._window_check_bytes = max(limit, min(self._window_check_bytes, self._waiting_bytes + limit // 4))

    def _start_ticker(self) -> None:
        self._ticker = self._loop.call_later(self._settings.add_timeout_s / _TICKS_PER_TIMEOUT, self._on_tick)

    def _on_tick(self) -> None:
        self._ticker = None
        self._tick += 1
        if self._answered_at_tick >= self._tick - 1:
            self._reopen_delay_s = self._settings.reconnect_delay_s
        waiting = [lane for lane in self._lanes if lane.waits]
        late = [lane for lane in waiting if self._tick - lane.seen > _TICKS_PER_TIMEOUT and lane not in self._repeaters]
        if late:
            reason = f"answered nothing for {self._settings.add_timeout_s:g} s"
            if self._tick - self._answered_at_tick > _TICKS_PER_TIMEOUT:
                self.drop_stream(TimeoutError(f"{self.bookie_id} {reason}"))
            self._fail(late, reason)
        if len(waiting) > len(late) and self._ticker is None and not self._closed:
            self._start_ticker()


def _size(requests: Iterable[AddRequest]) -> int:
    return sum(len(request.group.data) + _REQUEST_BYTES for request in requests)
