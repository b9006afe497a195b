"""`cepheid ledgers read`: entries from the bookies, with their messages.

12:0  2026-11-21T10:00:00  producer p-1  sequence 7  2 messages  300 bytes
      [0] key=a  {"carrier": "UA"}
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cepheid_cli.admin.units import shown_time
from cepheid_cli.ledger_access import bookie_reach, reader_of, record_of
from cepheid_cli.ledger_source import LedgerSource
from cepheid_ledger import EntryBeyondEndError, EntryUnavailableError
from cepheid_rpc import EntryGroup
from cepheid_wire import WireError, decode_batch, decompress, parse_metadata, split_tail
from cepheid_wire import pulsar_api_pb2 as pb

_READ_BYTES = 4 << 20
_SHOWN_CHARS = 200


async def print_entries(source: LedgerSource, ledger_id: int, first: int, last: int | None, *, raw: bool) -> None:
    """Print entries. Raises LedgerError for an entry that cannot be read, or is beyond the end."""
    ledger = record_of(await source.one(ledger_id))
    async with bookie_reach(source) as reach:
        reader = reader_of(source, ledger, reach)
        end = await reader.read_lac()
        if first > max(end, 0):
            raise EntryBeyondEndError(f"entry {ledger_id}:{first} is above the known end {end}")
        wants_all = last is None
        if last is None:
            last = end
        while first <= last:
            for group in await reader.read(first, last, max_bytes=_READ_BYTES):
                for entry_id in range(group.first_entry_id, group.last_entry_id + 1):
                    _print_entry(group, entry_id, raw=raw)
                first = group.last_entry_id + 1
    if wants_all and reader.may_miss_entries:
        message = f"ledger {ledger_id} may have entries above {end}: {', '.join(reader.silent)} did not answer"
        raise EntryUnavailableError(message, ledger_id=ledger_id, known_end=end)
    if not raw and end < 0:
        print(f"ledger {ledger_id} has no confirmed entry")


def _print_entry(group: EntryGroup, entry_id: int, *, raw: bool) -> None:
    payload = group.payload(entry_id)
    if raw:
        sys.stdout.buffer.write(payload)
        return
    for line in lines_of(group.ledger_id, entry_id, payload):
        print(line)


def lines_of(ledger_id: int, entry_id: int, payload: memoryview) -> Iterator[str]:
    place = f"{ledger_id}:{entry_id}"
    try:
        metadata, body = parse_metadata(payload), split_tail(payload)[1]
    except WireError:  # of a cursor, or of another writer than a broker
        yield f"{place}  {len(payload)} bytes, not a message"
        return
    messages = metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else 1
    yield (
        f"{place}  {shown_time(metadata.publish_time)}  producer {_printable(metadata.producer_name)}  "
        f"sequence {metadata.sequence_id}  "
        f"{messages} {'message' if messages == 1 else 'messages'}  {len(payload)} bytes"
    )
    indent = " " * (len(place) + 2)
    try:
        yield from (f"{indent}{line}" for line in _messages(metadata, body))
    except WireError as error:
        yield f"{indent}cannot be shown: {error}"


def _messages(metadata: pb.MessageMetadata, body: memoryview) -> Iterator[str]:
    if metadata.encryption_keys:
        yield "encrypted"
        return
    content = decompress(metadata.compression, body, metadata.uncompressed_size)
    if not metadata.HasField("num_messages_in_batch"):
        yield _shown(metadata.partition_key if metadata.HasField("partition_key") else None, content)
        return
    for index, (single, payload) in enumerate(decode_batch(content, metadata.num_messages_in_batch)):
        yield f"[{index}] " + _shown(single.partition_key if single.HasField("partition_key") else None, bytes(payload))


def _shown(key: str | None, payload: bytes) -> str:
    text = _printable(payload[: 4 * _SHOWN_CHARS].decode(errors="backslashreplace")[:_SHOWN_CHARS])
    more = "…" if len(payload) > len(text.encode()) else ""
    return (f"key={_printable(key)}  " if key is not None else "") + text + more


def _printable(text: str) -> str:
    """Escape text from clients, which must not control a terminal."""
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
