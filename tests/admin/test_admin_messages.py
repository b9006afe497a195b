"""Single messages over the API: payloads as they were before compression, everything else in headers."""

from __future__ import annotations

import asyncio
import base64
import json
import zlib
from contextlib import suppress
from typing import Any

import pytest

from cepheid_broker.admin import messages
from cepheid_broker.admin.stored_message import message_answer
from cepheid_metadata import Position
from cepheid_wire import TopicName, decode_batch, encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.admin.admin_world import NAMESPACE, AdminWorld
from tests.support import wait_until

FULL = "persistent://public/default"
EARLIEST = {"ledgerId": -1, "entryId": -1}
PAYLOAD = b"the same words over and over, " * 50


def metadata(**fields: Any) -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=7, publish_time=1_761_378_654_254, **fields)


def answer(message: pb.MessageMetadata, payload: bytes) -> tuple[bytes, dict[str, str]]:
    body, headers = message_answer(Position(3, 4), encode_tail(message, payload))
    assert all(name.startswith("X-Pulsar-") for name, _ in headers)
    assert all(text.isascii() and text.isprintable() for header in headers for text in header)
    return body, {name.removeprefix("X-Pulsar-"): value for name, value in headers}


def test_a_payload_is_answered_as_it_was_before_compression() -> None:
    body, headers = answer(metadata(compression=pb.ZLIB, uncompressed_size=len(PAYLOAD)), zlib.compress(PAYLOAD))
    assert body == PAYLOAD
    assert (headers["compression"], headers["uncompressed-size"]) == ("ZLIB", str(len(PAYLOAD)))


def test_a_batch_is_marked_and_comes_whole() -> None:
    batch = encode_batch([(pb.SingleMessageMetadata(), b"one"), (pb.SingleMessageMetadata(), b"two")])
    body, headers = answer(
        metadata(num_messages_in_batch=2, compression=pb.ZLIB, uncompressed_size=len(batch)), zlib.compress(batch)
    )
    assert [bytes(each) for _, each in decode_batch(body, int(headers["num-batch-message"]))] == [b"one", b"two"]
    assert headers["Message-ID"] == "3:4"
    _, headers = answer(metadata(num_messages_in_batch=1), encode_batch([(pb.SingleMessageMetadata(), b"x")]))
    assert headers["num-batch-message"] == "1", "a batch of one is one"
    _, headers = answer(metadata(), b"x")
    assert "num-batch-message" not in headers, "it switches clients to batches"


def test_what_is_encrypted_and_what_is_one_chunk_come_as_stored() -> None:
    key = pb.EncryptionKeys(key="k", value=b"\x01")
    sealed = metadata(
        compression=pb.LZ4, uncompressed_size=99, encryption_keys=[key], encryption_algo="a", encryption_param=b"\x02"
    )
    body, headers = answer(sealed, b"sealed")
    assert (body, headers["Is-Encrypted"], headers["encryption-algo"]) == (b"sealed", "true", "a")
    assert pb.EncryptionKeys.FromString(base64.b64decode(headers["Base64-encryption-keys"])) == key
    assert base64.b64decode(headers["Base64-encryption-param"]) == b"\x02"
    chunk = metadata(compression=pb.LZ4, uuid="p-7", chunk_id=0, num_chunks_from_msg=2, total_chunk_msg_size=12)
    body, headers = answer(chunk, b"part")
    assert (body, headers["PROPERTY-CHUNK-ID"], headers["PROPERTY-TOTAL-CHUNKS"]) == (b"part", "0", "2")
    assert (headers["uuid"], headers["total-chunk-msg-size"]) == ("p-7", "12")


def test_every_field_has_its_header() -> None:
    _, headers = answer(
        metadata(
            event_time=1,
            deliver_at_time=253_402_300_800_000,
            partition_key="clé",
            partition_key_b64_encoded=False,
            ordering_key=b"\xff",
            schema_version=b"\x00\x01",
            null_value=True,
            replicated_from="east",
            highest_sequence_id=9,
            marker_type=3,
            txnid_least_bits=1,
            txnid_most_bits=2,
        ),
        b"",
    )
    assert headers == {
        "Message-ID": "3:4",
        "publish-time": "2025-10-25T07:50:54.254Z",
        "event-time": "1970-01-01T00:00:00.001Z",
        "deliver-at-time": "9999-12-31T23:59:59.999Z",  # the last one there is
        "producer-name": "p",
        "sequence-id": "7",
        "highest-sequence-id": "9",
        "replicated-from": "east",
        "partition-key": "cl%C3%A9",
        "partition-key-b64-encoded": "false",
        "marker-type": "3",
        "txnid-least-bits": "1",
        "txnid-most-bits": "2",
        "null-value": "true",
        "Base64-ordering-key": "/w==",
        "Base64-schema-version": "AAE=",
    }


def test_properties_are_one_object_and_one_header_each_where_that_is_possible() -> None:
    pairs = {"plain": "value", "ü": "✓", "a b": "c\r\nX-Evil: 1", "empty": ""}
    _, headers = answer(metadata(properties=[pb.KeyValue(key=key, value=value) for key, value in pairs.items()]), b"")
    assert json.loads(headers["PROPERTY"]) == pairs
    assert headers["PROPERTY-plain"] == "value"
    assert {name for name in headers if name.startswith("PROPERTY-")} == {"PROPERTY-plain", "PROPERTY-empty"}
    many = [pb.KeyValue(key=f"k{number}", value="v") for number in range(100)]
    _, headers = answer(metadata(properties=many), b"")
    assert len(json.loads(headers["PROPERTY"])) == 100
    assert "PROPERTY-k1" not in headers, "clients read no more than 100 headers"
    _, headers = answer(metadata(properties=[pb.KeyValue(key="k", value="v" * 40_000)]), b"")
    assert "PROPERTY" not in headers
    assert "1 properties" in headers["PROPERTIES-LEFT-OUT"]


@pytest.mark.slow
def test_peeking_counts_from_the_mark_delete_position_and_consumes_nothing(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/peeked/subscription/s", json=EARLIEST)
    positions = admin.publish(f"{FULL}/peeked", [b"a", b"b", b"c"])
    path = f"{NAMESPACE}/peeked/subscription/s"
    admin.post(f"{path}/skip/1")
    for number, body in ((1, b"b"), (2, b"c"), (1, b"b")):
        found = admin.get(f"{path}/position/{number}")
        assert (found.status_code, found.content) == (200, body)
        assert found.headers["X-Pulsar-Message-ID"] == "{}:{}".format(*positions[number])
        assert found.headers["content-type"] == "application/octet-stream"
    for number in (3, 0, -1, 10**30):
        assert admin.get(f"{path}/position/{number}").status_code == 404, "a 404 ends the peek of the Go client"
    assert admin.get(f"{path}/position/x").status_code == 400
    assert admin.get(f"{NAMESPACE}/peeked/subscription/none/position/1").status_code == 404
    assert admin.get(f"{NAMESPACE}/peeked/subscriptions").json() == ["s"], "looking created nothing"


def test_examining_counts_from_either_end(admin: AdminWorld) -> None:
    admin.keep_everything("examined")
    path = "/admin/v2/persistent/public/examined/t"
    admin.put(path)
    assert admin.get(f"{path}/examinemessage").status_code == 412, "it is empty"
    admin.publish("persistent://public/examined/t", [b"a", b"b", b"c"])
    for query, body in (("", b"c"), ("?messagePosition=3", b"a"), ("?initialPosition=earliest&messagePosition=2", b"b")):
        assert admin.get(f"{path}/examinemessage{query}").content == body
    for query, status in (("?messagePosition=4", 404), ("?messagePosition=0", 412), ("?initialPosition=middle", 412)):
        assert admin.get(f"{path}/examinemessage{query}").status_code == status


def test_a_message_is_found_by_id_acknowledged_or_not(admin: AdminWorld) -> None:
    admin.keep_everything("by-id")
    path = "/admin/v2/persistent/public/by-id/t/ledger"
    ((ledger_id, entry_id),) = admin.publish("persistent://public/by-id/t", [b"a"])
    assert admin.get(f"{path}/{ledger_id}/entry/{entry_id}").content == b"a"
    for ledger, entry in ((ledger_id, entry_id + 1), (ledger_id, -1), (ledger_id + 999, 0), (-1, -1), (2**63, 2**70)):
        assert admin.get(f"{path}/{ledger}/entry/{entry}").status_code == 404


def test_an_entry_whose_payload_is_broken_is_422_and_says_so(admin: AdminWorld) -> None:
    admin.put(f"{NAMESPACE}/broken/subscription/s", json=EARLIEST)

    async def publish() -> None:
        topic = await admin.standalone.broker.topics.get(TopicName.parse(f"{FULL}/broken"), may_create=False)
        stored = asyncio.Event()
        tail = encode_tail(metadata(compression=pb.ZSTD, uncompressed_size=9), b"nonsense")
        topic.publish([tail], lambda *_: stored.set())
        await stored.wait()

    admin.run(publish())
    found = admin.get(f"{NAMESPACE}/broken/examinemessage")
    assert found.status_code == 422
    assert "cannot be decompressed" in found.json()["reason"]


@pytest.mark.slow
def test_clients_that_peek_and_do_not_read_have_a_few_messages_in_memory_and_the_others_wait(
    admin: AdminWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    size_bytes = 16 << 20  # more than sockets take
    decompressed = note_decompressed(monkeypatch)

    async def peek() -> None:
        path = await publish_bomb(admin, size_bytes)
        clients = [await open_connection(admin, path) for _ in range(messages.PEEKS_AT_ONCE + 2)]
        await wait_until(lambda: len(decompressed) == messages.PEEKS_AT_ONCE)
        assert (await admin.send("GET", f"{NAMESPACE}/bomb/stats")).status_code == 200, "other calls do not wait"
        assert len(decompressed) == messages.PEEKS_AT_ONCE
        reader, _ = clients[0]
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: %d\r\n" % size_bytes in head.lower()
        await reader.readexactly(size_bytes)
        await wait_until(lambda: len(decompressed) == messages.PEEKS_AT_ONCE + 1)
        for _, writer in clients:
            await abort(writer)
        assert len((await admin.send("GET", path)).content) == size_bytes, "whoever goes away gives its place back"
        monkeypatch.setattr(messages, "READ_TIMEOUT_S", 0.0)
        for _ in range(messages.PEEKS_AT_ONCE):
            reader, writer = await open_connection(admin, path)
            assert len(await reader.read()) < size_bytes, "too slow: the connection is closed"
            await abort(writer)
        monkeypatch.undo()
        assert len((await admin.send("GET", path)).content) == size_bytes

    admin.run(peek())


@pytest.mark.slow
def test_clients_at_one_address_leave_places_for_peeking_to_others(admin: AdminWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    decompressed = note_decompressed(monkeypatch)
    monkeypatch.setattr(messages, "is_loopback", lambda _: False)

    async def peek() -> None:
        path = await publish_bomb(admin, 16 << 20)
        clients = [await open_connection(admin, path) for _ in range(messages.PEEKS_AT_ONCE)]
        await wait_until(lambda: len(decompressed) == messages.PEEKS_PER_ADDRESS)
        monkeypatch.setattr(messages, "PLACE_TIMEOUT_S", 0.0)
        refused = await admin.send("GET", path)
        assert refused.status_code == 503
        assert "2 messages are being read by admin clients at 127.0.0.1, which is the limit for an address" in refused.text
        monkeypatch.setattr(messages, "is_loopback", lambda _: True)  # as one at another address
        monkeypatch.setattr(messages, "PLACE_TIMEOUT_S", 30.0)
        assert (await admin.send("GET", path)).status_code == 200
        for _, writer in clients:
            await abort(writer)

    admin.run(peek())


def note_decompressed(monkeypatch: pytest.MonkeyPatch) -> list[Position]:
    """Return the positions of the messages that calls have decompressed since, as they do."""
    decompressed: list[Position] = []

    def noted(position: Position, tail: bytes) -> tuple[bytes, list[tuple[str, str]]]:
        decompressed.append(position)
        return message_answer(position, tail)

    monkeypatch.setattr(messages, "message_answer", noted)
    return decompressed


async def publish_bomb(admin: AdminWorld, size_bytes: int) -> str:
    """Publish a message of which a thousandth is stored. Return the path that shows it."""
    bomb = encode_tail(metadata(compression=pb.ZLIB, uncompressed_size=size_bytes), zlib.compress(bytes(size_bytes)))
    topic = await admin.standalone.broker.topics.get(TopicName.parse(f"{FULL}/bomb"), may_create=True)
    stored: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
    topic.publish([bomb], lambda outcome, _: stored.set_result(outcome))  # type: ignore[arg-type]
    return "{}/bomb/ledger/{}/entry/{}".format(NAMESPACE, *await stored)


async def abort(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def open_connection(admin: AdminWorld, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """One that has asked, and reads nothing yet."""
    host, port = admin.standalone.admin_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return reader, writer
