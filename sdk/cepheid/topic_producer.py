"""The producer of one unpartitioned topic, or of one partition.

    add ──► open batch ──seal──► unanswered entries ──► SEND ──receipt──► futures of its messages
                                      └── all of them are sent again, in order, after the topic moved or the connection broke

Rules
 1. Sequence ids are assigned when a batch is sealed; entries are sent and answered in this order. A receipt for any other than the
    first unanswered entry is late (ignored), or shows that the broker lost one (the connection is closed and all are sent again).
 2. A batch is sealed when it is full, when its time is up, and at the end of the loop's turn if nothing is unanswered: a lone
    message does not wait for others, and under load batches fill while receipts are in flight. A sender that waits for each
    receipt does not wait for the turn either: its last message was alone.
 3. A message that leaves the window has ended: stored, or failed with an error that reached its future or the count of failures.
 4. A repeatable producer closes batches by count and bytes only, and ends at its first failure: an application that restarts and
    continues after `last_sequence_id` creates the same batches from the same messages, and finds no gap before that.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cepheid.batching import NO_ATTRIBUTES, Attributes, FrameParts, OpenBatch, SendFrames, header_of
from cepheid.compression import Compressor
from cepheid.connection import Connection
from cepheid.encryption import MessageEncryptor
from cepheid.errors import (
    ClosedError,
    Error,
    FencedError,
    MessageTooLargeError,
    SendFailedError,
    TerminatedError,
    TimedOutError,
    UsageError,
    refused,
)
from cepheid.forks import sever_in_children
from cepheid.lookup import Lookup
from cepheid.message_id import MessageId
from cepheid.topic_link import TopicLink
from cepheid_wire import ServerError, signed64
from cepheid_wire import pulsar_api_pb2 as pb

SendWaiter = asyncio.Future[MessageId]
_HEADER_BYTES = 16
"""Upper bound of the header of a message that has only a payload."""
_ACCESS_MODES = {
    "shared": pb.Shared,
    "exclusive": pb.Exclusive,
    "wait_for_exclusive": pb.WaitForExclusive,
    "exclusive_with_fencing": pb.ExclusiveWithFencing,
}


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """Options shared by the partitions of one producer."""

    name: str | None
    access: str
    properties: dict[str, str]
    schema: pb.Schema | None
    batching: bool
    batch_by_key: bool
    batch_messages: int
    batch_bytes: int
    batch_delay_s: float
    compression: int
    compress: Compressor | None
    chunking: bool
    send_timeout_s: float
    initial_subscription: str | None = None
    repeatable: bool = False
    encryptor: MessageEncryptor | None = None

    def __post_init__(self) -> None:
        if self.access not in _ACCESS_MODES:
            raise UsageError(f"access must be one of {', '.join(_ACCESS_MODES)}, got {self.access!r}")


class SendWindow:
    """Messages and bytes accepted but not answered yet, over all partitions of a producer."""

    def __init__(self, limit_messages: int, limit_bytes: int) -> None:
        if limit_messages < 1 or limit_bytes < 1:
            raise UsageError(f"window_messages and window_bytes must be 1 or more, got {limit_messages} and {limit_bytes}")
        self.limit_messages = limit_messages
        self.limit_bytes = limit_bytes
        self.messages = 0
        self.bytes = 0
        self.failed = 0
        self.first_failure: Error | None = None
        self._waiters: dict[int, asyncio.Future[None]] = {}  # by ticket, in the order of the calls
        self._tickets = itertools.count()
        self._is_waking = False

    def __repr__(self) -> str:
        return f"<SendWindow {self.messages} messages, {self.bytes} bytes>"

    @property
    def is_full(self) -> bool:
        """Whether the window is full; soft by one message: an accepted message is never refused for its size."""
        return self.messages >= self.limit_messages or self.bytes >= self.limit_bytes

    @property
    def has_waiters(self) -> bool:
        """Whether calls wait for room, or are about to take the room reserved for them."""
        return bool(self._waiters)

    def give_back(self, messages: int, size_bytes: int) -> None:
        self.messages -= messages
        self.bytes -= size_bytes
        if self._waiters:
            self._wake()

    def add_failures(self, count: int, error: Error) -> None:
        self.failed += count
        if self.first_failure is None:
            self.first_failure = error

    def raise_failures(self) -> None:
        """Raise SendFailedError if messages failed since the last call, and forget the failures."""
        count, first = self.failed, self.first_failure
        self.failed, self.first_failure = 0, None
        if count and first is not None:
            raise SendFailedError(f"{count} messages were not stored; the first because: {first}", count=count, first=first)

    async def wait_for_room(self) -> None:
        """Return when there is room and earlier calls have had theirs. The caller takes the room without awaiting anything."""
        if not self.is_full and not self._waiters:
            return
        loop = asyncio.get_running_loop()
        ticket = next(self._tickets)
        self._waiters[ticket] = loop.create_future()
        try:
            self._wake_soon(loop)  # earlier calls may not need all the room
            await self._waiters[ticket]
            while self.is_full:
                self._waiters[ticket] = loop.create_future()  # its place in the order stays
                await self._waiters[ticket]
        finally:
            del self._waiters[ticket]
            self._wake_soon(loop)

    def _wake_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiters and not self._is_waking:
            self._is_waking = True
            loop.call_soon(self._wake)

    def _wake(self) -> None:
        """Wake as many callers as there is room for, in order.

        They stay queued until they run, so newcomers do not overtake them.
        """
        self._is_waking = False
        if self.bytes < self.limit_bytes:
            for waiter in itertools.islice(self._waiters.values(), max(self.limit_messages - self.messages, 0)):
                if not waiter.done():
                    waiter.set_result(None)


@dataclass(slots=True)
class _Filling:
    """A batch that is being filled, and the callers that wait for its messages."""

    batch: OpenBatch = field(default_factory=OpenBatch)
    waiters: list[tuple[int, SendWaiter]] = field(default_factory=list)


@dataclass(slots=True)
class _Entry:
    """A sealed entry. `messages` is 0 for all chunks of a message except the last."""

    sequence_id: int
    parts: FrameParts
    messages: int
    size_bytes: int
    is_batch: bool
    deadline: float
    waiters: list[tuple[int, SendWaiter]]
    on_ended: list[asyncio.Future[None]] = field(default_factory=list)


class TopicProducer(TopicLink):
    """The producer of one topic or partition; see the module."""

    def __init__(
        self,
        topic: str,
        partition: int,
        producer_id: int,
        options: ProducerOptions,
        window: SendWindow,
        lookup: Lookup,
        timeout_s: float,
        on_batch_ended: Callable[[], None],
    ) -> None:
        super().__init__(topic, f"the producer of {topic}", lookup, timeout_s)
        self.name = options.name or ""
        self.last_sequence_id = -1
        self._partition = partition
        self._producer_id = producer_id
        self._options = options
        self._window = window
        self._on_batch_ended = on_batch_ended
        self._batch_limit_messages = options.batch_messages if options.batching else 1
        self._batch_limit_bytes = options.batch_bytes
        self._max_message_bytes = 0
        self.server_version = ""
        self._filling: dict[str | bytes | None, _Filling] = {}  # one batch, or with batch_by_key one per key
        self._plain: _Filling | None = None  # the batch that accepts messages without attributes
        self._open_messages = 0
        self._open_bytes = 0
        self._unanswered: deque[_Entry] = deque()
        self._next_sequence_id = 0
        self._last_id = -1  # of the messages sealed by this object, numbered by the application or here
        self._frames: SendFrames
        self._seal_soon: asyncio.Handle | None = None
        self._is_lone = False  # the last message was alone and did not wait: the next one need not wait for the loop's turn
        self._expiry: asyncio.TimerHandle | None = None
        self._epoch = 0
        self._is_closing = False
        sever_in_children(self)
        self._topic_epoch: int | None = None
        self._broken = False  # the broker refused an entry: nothing more is sent until the producer is opened again
        self._to_leave: Connection | None = None  # connection on which to close the refused incarnation first

    @property
    def unanswered_entries(self) -> int:
        return len(self._unanswered)

    def refuse_more(self) -> None:
        """Accept no more messages, as the producer is being closed. Accepted ones are sent."""
        self._is_closing = True
        self.seal()

    def check_usable(self) -> None:
        super().check_usable()
        if self._is_closing:
            raise ClosedError(f"{self.what} is closed")

    def sever(self) -> None:
        """In a forked child: drop what is open, which the parent sends; the next message meets the check in `add`."""
        self._plain = None

    # Sending

    def add_plain(self, payload: bytes) -> None:
        """Accept a message without attributes. The caller has checked the window and `check_usable`."""
        size_bytes = len(payload)
        filling = self._plain
        if filling is None or self._open_bytes + size_bytes > self._batch_limit_bytes:
            self.add(payload, NO_ATTRIBUTES, None, None)
            return
        self._window.messages += 1
        self._window.bytes += size_bytes
        filling.batch.add_plain(payload)
        self._open_messages += 1
        self._open_bytes += size_bytes
        if self._open_messages >= self._batch_limit_messages:
            self.seal()

    def add(self, payload: bytes, attributes: Attributes, sequence_id: int | None, waiter: SendWaiter | None) -> None:
        """Accept a message. Raises MessageTooLargeError, UsageError; nothing has changed then."""
        self.check_usable()
        header = b"" if attributes is NO_ATTRIBUTES else header_of(len(payload), attributes)
        size_bytes = len(payload) + len(header)
        options = self._options
        if sequence_id is not None:
            self._expect_sequence_id(sequence_id)
        alone = not options.batching or size_bytes > self._batch_limit_bytes or attributes.deliver_at_ms is not None
        if alone:
            self._add_alone(payload, attributes, waiter)
            return
        if self._open_bytes + size_bytes > self._batch_limit_bytes:
            self.seal()
        key: str | bytes | None = None
        if options.batch_by_key:  # brokers dispatch by the ordering key if there is one
            key = attributes.key if attributes.ordering_key is None else attributes.ordering_key
        filling = self._filling.get(key)
        if filling is None:
            filling = self._filling[key] = _Filling()
            if key is None:
                self._plain = filling
        index = len(filling.batch)
        if attributes is NO_ATTRIBUTES:
            filling.batch.add_plain(payload)
        else:
            filling.batch.add(payload, header, attributes)
        if waiter is not None:
            filling.waiters.append((index, waiter))
        self._window.messages += 1
        self._window.bytes += size_bytes
        self._open_messages += 1
        self._open_bytes += size_bytes
        if self._open_messages >= self._batch_limit_messages:
            self.seal()
        elif self._seal_soon is None and not options.repeatable:  # rule 4
            loop = asyncio.get_running_loop()
            if self._unanswered:
                self._seal_soon = loop.call_later(options.batch_delay_s, self.seal)
            elif self._is_lone and waiter is not None:
                self.seal()
            else:
                self._seal_soon = loop.call_soon(self.seal)

    def seal(self) -> None:
        """Create entries from open batches, and send them."""
        if self._seal_soon is not None:
            self._seal_soon.cancel()
            self._seal_soon = None
        if not self._open_messages:
            return
        filled, self._filling = self._filling, {}
        self._plain = None
        self._open_messages = self._open_bytes = 0
        now_ms = time.time_ns() // 1_000_000
        is_first = not self._unanswered
        for filling in filled.values():
            count, size_bytes = len(filling.batch), filling.batch.size_bytes
            parts, _ = self._frames.batch(filling.batch, self._next_sequence_id, now_ms)
            self._push(parts, count, count, size_bytes, filling.waiters, is_batch=True)
        self._is_lone = is_first and count == 1 and len(filled) == 1
        self._on_batch_ended()

    async def wait_answered(self) -> None:
        """Return when everything accepted so far has ended."""
        self.seal()
        if self._unanswered:
            ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._unanswered[-1].on_ended.append(ended)
            await ended

    async def close(self) -> None:
        """Leave the topic. Unanswered messages fail."""
        connection = self.connection
        await self.stop()
        if connection is not None:
            try:
                ask = pb.CommandCloseProducer(producer_id=self._producer_id)
                await self._request(connection, ask, f"closing {self.what}")
            except Error:
                pass  # a broker that does not answer has dropped the producer anyway
            connection.producers.pop(self._producer_id, None)
        self.connection = None
        self._end_timers()
        self._fail_all(Error(f"{self.what} was closed before the receipt came: the message may be stored or not"))

    def _add_alone(self, payload: bytes, attributes: Attributes, waiter: SendWaiter | None) -> None:
        self.seal()  # to keep the order
        now_ms = time.time_ns() // 1_000_000
        frames: list[FrameParts]
        parts, packed_bytes = self._frames.single(payload, attributes, self._next_sequence_id, now_ms)
        if packed_bytes <= self._max_message_bytes:
            frames = [parts]
        elif self._options.chunking:
            frames = self._frames.chunks(payload, attributes, self._next_sequence_id, now_ms, self._max_message_bytes)
        else:
            raise MessageTooLargeError(
                f"{self.topic}: the broker takes messages of up to {self._max_message_bytes:,} bytes; "
                f"this one has {packed_bytes:,} with its metadata"
            )
        self._window.messages += 1
        self._window.bytes += len(payload)
        waiters = [] if waiter is None else [(-1, waiter)]
        for parts in frames[:-1]:
            self._push(parts, 0, 0, 0, [], is_batch=False)
        self._push(frames[-1], 1, 1, len(payload), waiters, is_batch=False)
        self._on_batch_ended()

    def _expect_sequence_id(self, sequence_id: int) -> None:
        """Check an application's sequence id: within a batch ids follow each other without gaps."""
        if self._options.batch_by_key:
            raise UsageError("sequence_id cannot be given with batch_by_key: batches by key are sent in another order")
        last_id = self._next_sequence_id + self._open_messages - 1 if self._open_messages else self._last_id
        if sequence_id <= last_id:  # with deduplication it would be dropped, and reported as stored
            raise UsageError(f"sequence_id must grow: got {sequence_id} after {last_id}")
        if sequence_id != self._next_sequence_id + self._open_messages:
            self.seal()
            self._next_sequence_id = sequence_id

    def _push(
        self,
        parts: FrameParts,
        sequence_ids: int,
        messages: int,
        size_bytes: int,
        waiters: list[tuple[int, SendWaiter]],
        *,
        is_batch: bool,
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._options.send_timeout_s
        entry = _Entry(self._next_sequence_id, parts, messages, size_bytes, is_batch, deadline, waiters)
        self._next_sequence_id += sequence_ids
        self._last_id = self._next_sequence_id - 1 if sequence_ids else self._last_id
        self._unanswered.append(entry)
        if self._expiry is None and self._options.send_timeout_s > 0:
            self._expiry = loop.call_at(deadline, self._expire)
        if self.connection is not None and not self._broken:
            self.connection.write_parts(parts)

    # Callbacks of the connection

    def on_receipt(self, receipt: pb.CommandSendReceipt) -> None:
        if not self._unanswered or receipt.sequence_id < self._unanswered[0].sequence_id:
            return  # rule 1: late, for an entry that is no longer expected
        entry = self._unanswered[0]
        if receipt.sequence_id > entry.sequence_id:
            if self.connection is not None:
                self.connection.abort(f"a receipt for {receipt.sequence_id} came while {entry.sequence_id} is the next")
            return
        self._unanswered.popleft()
        self._reattach_backoff.reset()
        if entry.messages:  # not for a chunk with later ones of its message: it is useless without them
            self.last_sequence_id = entry.sequence_id + entry.messages - 1
        if entry.waiters:
            ledger_id, entry_id = signed64(receipt.message_id.ledgerId), signed64(receipt.message_id.entryId)
            size = entry.messages if entry.is_batch else 0
            for index, waiter in entry.waiters:
                if not waiter.done():
                    waiter.set_result(MessageId(ledger_id, entry_id, index if entry.is_batch else -1, self._partition, size))
        self._end(entry)
        if not self._unanswered and self._open_messages and not self._options.repeatable:
            self.seal()  # rule 2

    def on_send_error(self, error: pb.CommandSendError) -> None:
        refused_entries = [entry for entry in self._unanswered if entry.sequence_id == error.sequence_id]
        if not refused_entries:
            return  # rule 1: late
        reason = refused(error.error, error.message, f"a message to {self.topic}")
        if isinstance(reason, TerminatedError | FencedError):
            self._fail(reason)
            return
        if reason.code in (ServerError.CHECKSUM_ERROR, ServerError.NOT_ALLOWED_ERROR):  # concerns only this message
            if self._options.repeatable:  # rule 4
                self._fail(reason)
                return
            # Not only the first entry: Apache Pulsar may refuse one before it confirms earlier ones.
            self._unanswered = deque(entry for entry in self._unanswered if entry.sequence_id != error.sequence_id)
            for entry in refused_entries:
                self._fail_entry(entry, reason)
        if reason.code is not ServerError.CHECKSUM_ERROR:
            self._broken = True  # Cepheid accepts nothing more from this incarnation
            self._reopen()

    def _reopen(self) -> None:
        self._to_leave = self.connection
        self._detach("")

    @property
    def _opening_limit_s(self) -> float | None:
        return None if self._options.access == "wait_for_exclusive" else self._timeout_s

    async def _before_reattach(self) -> None:
        if (connection := self._to_leave) is not None:
            self._to_leave = None
            try:
                ask = pb.CommandCloseProducer(producer_id=self._producer_id)
                await self._request(connection, ask, f"closing {self.what}")
            except Error:
                pass  # the broker has dropped it: it is opened again in any case
            connection.producers.pop(self._producer_id, None)
        await super()._before_reattach()

    async def _attach(self, connection: Connection) -> None:
        options = self._options
        ask = pb.CommandProducer(topic=self.topic, producer_id=self._producer_id, epoch=self._epoch)
        self._epoch += 1
        if self.name:
            ask.producer_name = self.name
        ask.user_provided_producer_name = options.name is not None
        ask.producer_access_mode = _ACCESS_MODES[options.access]
        if self._topic_epoch is not None:
            ask.topic_epoch = self._topic_epoch
        if options.initial_subscription is not None:
            ask.initial_subscription_name = options.initial_subscription
        for key, value in options.properties.items():
            ask.metadata.add(key=key, value=value)
        if options.encryptor is not None:
            ask.encrypted = True
        if options.schema is not None:
            ask.schema.CopyFrom(options.schema)
        connection.producers[self._producer_id] = self
        timeout_s = None if options.access == "wait_for_exclusive" else self._timeout_s
        try:
            answer = await connection.request(ask, f"opening {self.what}", timeout_s)
        except BaseException:
            connection.producers.pop(self._producer_id, None)
            connection.tell(pb.CommandCloseProducer(producer_id=self._producer_id))
            raise
        if answer.HasField("topic_epoch"):
            self._topic_epoch = answer.topic_epoch
        if not self._opened and not self._unanswered:
            self.last_sequence_id = answer.last_sequence_id
            self._next_sequence_id = answer.last_sequence_id + 1
        self.name = answer.producer_name
        self._max_message_bytes = connection.max_message_bytes
        self.server_version = connection.server_version
        # An entry must not be larger than the broker accepts, or it would close the connection and get the entry again for ever.
        self._batch_limit_bytes = min(options.batch_bytes, connection.max_message_bytes // 2)
        if options.batching:
            self._batch_limit_messages = min(options.batch_messages, connection.max_message_bytes // 2 // _HEADER_BYTES)
        self._frames = SendFrames(
            self._producer_id, self.name, answer.schema_version, options.compression, options.compress, options.encryptor
        )

    def _on_attached(self, connection: Connection) -> None:
        self._broken = False
        if not self._unanswered:
            self._reattach_backoff.reset()  # otherwise with a receipt: repeated entries may be refused again
        for entry in self._unanswered:
            connection.write_parts(entry.parts)

    def _on_failed(self, error: Error) -> None:
        if self.connection is not None:
            self.connection.producers.pop(self._producer_id, None)
            self.connection = None
        self._end_timers()
        self._fail_all(error)

    # The end of entries

    def _expire(self) -> None:
        """Fail the entries whose time is over. They are not sent again, but the broker may have them."""
        self._expiry = None
        loop = asyncio.get_running_loop()
        while self._unanswered and self._unanswered[0].deadline <= loop.time():
            where = "attached" if self.connection is not None else "looking for the topic's broker"
            self._fail_first(
                TimedOutError(
                    f"{self.topic}: no receipt within {self._options.send_timeout_s} s ({where}); the message may be stored or not"
                ),
            )
        if self._unanswered:
            self._expiry = loop.call_at(self._unanswered[0].deadline, self._expire)

    def _fail_first(self, error: Error) -> None:
        """Fail the first unanswered entry;

        if it is a chunk, fail all remaining chunks of its message, which is useless without it.
        """
        if self._options.repeatable:  # rule 4: no later one may be stored
            self._fail(error)
            return
        sequence_id = self._unanswered[0].sequence_id
        while self._unanswered and self._unanswered[0].sequence_id == sequence_id:
            self._fail_entry(self._unanswered.popleft(), error)

    def _fail_all(self, error: Error) -> None:
        lost, self._filling = self._filling, {}
        self._plain = None
        self._open_messages = self._open_bytes = 0
        while self._unanswered:
            self._fail_entry(self._unanswered.popleft(), error)
        for filling in lost.values():
            size_bytes = filling.batch.size_bytes
            self._fail_entry(_Entry(-1, (), len(filling.batch), size_bytes, True, 0.0, filling.waiters), error)

    def _fail_entry(self, entry: _Entry, error: Error) -> None:
        silent = entry.messages
        for _, waiter in entry.waiters:
            if not waiter.done():  # otherwise its `send` was cancelled, so `flush` reports it
                waiter.set_exception(error)
                silent -= 1
        if silent:
            self._window.add_failures(silent, error)
        self._end(entry)

    def _end(self, entry: _Entry) -> None:
        self._window.give_back(entry.messages, entry.size_bytes)
        for ended in entry.on_ended:
            if not ended.done():
                ended.set_result(None)

    def _end_timers(self) -> None:
        for timer in (self._seal_soon, self._expiry):
            if timer is not None:
                timer.cancel()
        self._seal_soon = self._expiry = None
