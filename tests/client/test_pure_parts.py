"""The parts of the client that decide without I/O: addresses, routing, batches, acknowledgements, record types."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any, NotRequired, TypedDict

import pydantic
import pytest

import cepheid
from cepheid.acks import AckTracker, bits_of, words_of
from cepheid.backoff import Backoff
from cepheid.batching import Attributes, OpenBatch, SendFrames, header_of
from cepheid.entry_reader import ChunkBuffer, split_batch, split_plain_batch
from cepheid.message import EntryFacts
from cepheid.record_types import RecordCodec
from cepheid.routing import PartitionChooser, java_string_hash, murmur3_hash
from cepheid.schemas import BYTES
from cepheid.service_url import Address, parse_service_url
from cepheid_wire import FrameSplitter, decode_batch, encode_batch, parse_command, parse_metadata, split_tail
from cepheid_wire import pulsar_api_pb2 as pb


@pytest.mark.parametrize(
    ("url", "addresses"),
    [
        ("pulsar://a", [("a", 6650)]),
        ("pulsar://a:1,b:2/", [("a", 1), ("b", 2)]),
        ("pulsar://[::1]:7", [("::1", 7)]),
    ],
)
def test_a_service_url_has_one_or_more_addresses(url: str, addresses: list[tuple[str, int]]) -> None:
    assert parse_service_url(url) == tuple(Address(*address) for address in addresses)


@pytest.mark.parametrize(
    "url", ["", "a:1", "http://a:1", "pulsar://", "pulsar://a:x", "pulsar://a,,b", "pulsar+tls://a", "pulsar://a/b"]
)
def test_other_urls_are_refused_with_what_is_expected(url: str) -> None:
    with pytest.raises(cepheid.UsageError, match="pulsar://"):
        parse_service_url(url)


def test_back_off_doubles_up_to_its_limit() -> None:
    backoff = Backoff(0.1, 1.0)
    delays = [backoff.next_s() for _ in range(6)]
    for delay, full in zip(delays, (0.1, 0.2, 0.4, 0.8, 1.0, 1.0), strict=True):
        assert 0.8 * full <= delay <= full
    backoff.reset()
    assert backoff.next_s() <= 0.1


@pytest.mark.parametrize(
    ("key", "java", "murmur3"),
    [("", 0, 0), ("a", 97, 0x3C2569B2), ("hello", 99162322, 0x248BFA47)],
)
def test_key_hashes_are_those_of_the_official_clients(key: str, java: int, murmur3: int) -> None:
    assert (java_string_hash(key), murmur3_hash(key.encode())) == (java, murmur3)


def test_keys_keep_their_partition_and_messages_without_key_go_round() -> None:
    chooser = PartitionChooser(3, "round_robin", "java_string")
    assert {chooser.choose("hello") for _ in range(5)} == {99162322 % 3}
    turns = []
    for _ in range(6):
        turns += [chooser.choose(None), chooser.choose(None)]
        chooser.on_batch_ended()
    assert turns[0::2] == turns[1::2], "a batch keeps its partition"
    assert sorted(turns[0:6:2]) == [0, 1, 2]
    single = PartitionChooser(3, "single", "murmur3")
    first = single.choose(None)
    single.on_batch_ended()
    assert single.choose(None) == first
    with pytest.raises(cepheid.UsageError, match="returned 3; the topic has 3 partitions"):
        PartitionChooser(3, lambda key, partitions: 3, "java_string").choose(None)


@pytest.mark.parametrize("sizes", [(5,), (5, 5, 5), (0, 1, 200, 70_000), (3, 3, 4)])
def test_a_batch_of_plain_messages_reads_as_any_batch(sizes: tuple[int, ...]) -> None:
    payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
    batch = OpenBatch()
    for payload in payloads:
        batch.add_plain(payload)
    encoded = batch.encode_payload()
    assert [bytes(body) for _, body in decode_batch(encoded, len(sizes))] == payloads
    assert [(index, single, body) for index, single, body in split_batch(encoded, len(sizes))] == [
        (index, None, payload) for index, payload in enumerate(payloads) if len(payload) < 1 << 21
    ]


def test_a_batch_keeps_the_attributes_of_each_message() -> None:
    batch = OpenBatch()
    batch.add_plain(b"a")
    attributes = Attributes(key="k", properties={"p": "v"}, event_time_ms=7)
    batch.add(b"b", header_of(1, attributes), attributes)
    batch.add_plain(b"c")
    singles = split_batch(batch.encode_payload(), 3)
    assert [single is None for _, single, _ in singles] == [True, False, True]
    second = singles[1][1]
    assert second is not None
    assert (second.partition_key, second.properties[0].value, second.event_time) == ("k", "v", 7)
    assert batch.first is None, "the key of the second message is not that of the entry"


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:3], lambda data: b"\xff" * len(data)])
def test_a_damaged_batch_is_unreadable(damage: Any) -> None:
    batch = OpenBatch()
    batch.add_plain(b"abc")
    with pytest.raises(cepheid.UnreadableMessageError):
        split_batch(damage(batch.encode_payload()), 1)


def test_a_header_that_was_cut_off_is_not_remembered() -> None:
    with pytest.raises(cepheid.UnreadableMessageError, match="reaches beyond its end"):
        split_batch(b"\0\0\0\x03\x18\x00", 1)
    batch = [(pb.SingleMessageMetadata(payload_size=2), b"ab"), (pb.SingleMessageMetadata(payload_size=200), bytes(200))]
    assert [body for _, _, body in split_batch(encode_batch(batch), 2)] == [b"ab", bytes(200)]


@pytest.mark.parametrize(
    ("sizes", "is_plain"), [((7,), True), ((7, 7, 7), True), ((0, 0), True), ((7, 8, 6), False), ((7, 7, 8), False)]
)
def test_a_batch_of_equal_sizes_is_cut_at_fixed_distances(sizes: tuple[int, ...], is_plain: bool) -> None:
    payloads = [bytes([index]) * size for index, size in enumerate(sizes)]
    encoded = encode_batch((pb.SingleMessageMetadata(), payload) for payload in payloads)
    assert [body for _, _, body in split_batch(encoded, len(sizes))] == payloads
    assert split_plain_batch(encoded, len(sizes)) == (payloads if is_plain else None)


def test_equal_sizes_with_attributes_are_not_a_plain_batch() -> None:
    singles = [pb.SingleMessageMetadata(), pb.SingleMessageMetadata(null_value=True), pb.SingleMessageMetadata(partition_key="k")]
    split_batch(encode_batch([(singles[0], b"")]), 1)
    for single in singles[1:]:
        for batch in ([(single, b"")] * 2, [(singles[0], b""), (single, b"")]):
            encoded = encode_batch(batch)
            assert split_plain_batch(encoded, 2) is None
            assert split_batch(encoded, 2)[1][1] == pb.SingleMessageMetadata.FromString(single.SerializeToString())


def test_an_entry_is_acknowledged_when_all_its_messages_are() -> None:
    acks = AckTracker(batch_index=False)
    for index in (0, 2, 2):
        acks.ack((5, 1), index, 3)
    assert acks.take_individual() == []
    assert acks.left_of((5, 1)) == 0b010
    acks.ack((5, 1), 1, 3)
    assert acks.take_individual() == [pb.MessageIdData(ledgerId=5, entryId=1)]
    assert acks.left_of((5, 1)) is None


def test_messages_of_a_batch_that_are_not_delivered_do_not_hold_it_back() -> None:
    acks = AckTracker(batch_index=True)
    acks.deliver((5, 1), 0b1010)
    acks.ack((5, 1), 1, 4)
    assert acks.left_of((5, 1)) == 0b1000
    acks.ack((5, 1), 3, 4)
    assert acks.take_individual() == [pb.MessageIdData(ledgerId=5, entryId=1)]
    acks.ack((5, 2), 0, 2)
    acks.forget_parts()
    assert acks.left_of((5, 2)) == 0b10, "it is still to be sent"
    acks.take_individual()
    acks.forget_parts()
    assert acks.left_of((5, 2)) is None


def test_a_batch_that_waits_to_be_sent_takes_acknowledgements_by_itself() -> None:
    acks = AckTracker(batch_index=True)
    part = acks.ack((5, 1), 0, 4)
    assert part is not None
    assert [part.ack(1), part.ack(1), part.ack(2)] == [True, True, True]
    assert not part.ack(3), "the last one completes the entry"
    assert acks.left_of((5, 1)) == 0b1000
    (told,) = acks.take_individual()
    assert list(told.ack_set) == [0b1000]
    assert not part.ack(3), "it would not be sent"
    acks.ack((5, 1), 3, 4)
    assert acks.take_individual() == [pb.MessageIdData(ledgerId=5, entryId=1)]


@pytest.mark.parametrize(
    "change",
    [
        AckTracker.clear,
        lambda acks: acks.deliver((5, 1), 0b1110),
        lambda acks: acks.ack_cumulative((5, 2), -1, 0),
        lambda acks: acks.ack((5, 1), -1, 0),
    ],
)
def test_a_batch_that_is_no_longer_kept_leaves_acknowledgements_to_the_tracker(change: Callable[[AckTracker], Any]) -> None:
    acks = AckTracker(batch_index=True)
    part = acks.ack((5, 1), 0, 4)
    assert part is not None
    change(acks)
    assert not part.ack(1)


def test_parts_of_a_batch_are_told_as_bits_that_are_left() -> None:
    acks = AckTracker(batch_index=True)
    acks.ack((5, 1), 0, 70)
    (told,) = acks.take_individual()
    assert bits_of(list(told.ack_set)) == (1 << 70) - 2
    acks.ack((5, 2), -1, 0)
    assert [list(each.ack_set) for each in acks.take_individual()] == [[]]


@pytest.mark.parametrize(
    ("batch_index", "index", "place", "left"),
    [
        (True, 1, (5, 7), 0b1100),
        (True, 3, (5, 7), 0),
        (False, 1, (5, 6), 0),  # the rest of the batch comes again
        (False, 3, (5, 7), 0),
    ],
)
def test_cumulative_acknowledgement_inside_a_batch(batch_index: bool, index: int, place: tuple[int, int], left: int) -> None:
    acks = AckTracker(batch_index=batch_index)
    acks.ack((5, 3), 0, 2)
    acks.ack_cumulative((5, 7), index, 4)
    acks.ack_cumulative((5, 4), -1, 0)  # an earlier place changes nothing
    told = acks.take_cumulative()
    assert told is not None
    assert ((told.ledgerId, told.entryId), bits_of(list(told.ack_set))) == (place, left)
    assert acks.left_of((5, 3)) is None


@pytest.mark.parametrize("bits", [0, 1, 1 << 63, (1 << 64) - 1, 1 << 64, (1 << 130) - 2])
def test_ack_sets_are_signed_words(bits: int) -> None:
    words = words_of(bits)
    assert all(-(1 << 63) <= word < 1 << 63 for word in words)
    assert bits_of(words) == bits


def chunk(chunk_id: int, uuid: str = "u") -> pb.MessageMetadata:
    return pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0, uuid=uuid, num_chunks_from_msg=3, chunk_id=chunk_id)


def test_chunks_are_put_together_and_repetitions_reported() -> None:
    buffer = ChunkBuffer()
    assert buffer.add(chunk(1), (1, 0), b"?") is None, "the beginning was not seen"
    assert [buffer.add(chunk(index), (1, place), data) for index, place, data in ((0, 1, b"a"), (1, 2, b"b"), (1, 3, b"b"))] == [
        None
    ] * 3
    assert buffer.add(chunk(2), (1, 4), b"c") == (b"abc", ((1, 1), (1, 2), (1, 4)))
    assert len(buffer) == 0
    assert buffer.repeated == [(1, 3)]


def test_a_chunk_that_is_delivered_again_is_no_repetition() -> None:
    buffer = ChunkBuffer()
    for index in (0, 1, 0, 1):
        buffer.add(chunk(index), (1, index), b"%d" % index)
    assert buffer.add(chunk(2), (1, 2), b"2") == (b"012", ((1, 0), (1, 1), (1, 2)))
    assert buffer.repeated == []


def test_chunks_beyond_the_limit_are_given_up_until_their_message_begins_again() -> None:
    buffer = ChunkBuffer(limit_messages=1)
    for place, (index, uuid) in enumerate([(0, "a"), (1, "a"), (0, "b"), (2, "a"), (2, "unknown")]):
        buffer.add(chunk(index, uuid), (1, place), b"")
    assert buffer.given_up == [(1, 0), (1, 1), (1, 3)]
    buffer.add(chunk(0, "a"), (1, 0), b"")
    assert buffer.given_up[3:] == [(1, 2)]


def test_message_ids_compare_and_survive_serializing() -> None:
    first, second = cepheid.MessageId(5, 1, 0, 2, 10), cepheid.MessageId(5, 1, 3, 2, 10)
    assert cepheid.EARLIEST < first < second < cepheid.MessageId(6, 0) < cepheid.LATEST
    for message_id in (first, cepheid.EARLIEST, cepheid.LATEST):
        assert cepheid.MessageId.from_bytes(message_id.to_bytes()) == message_id
    with pytest.raises(cepheid.UsageError, match="not a serialized message id"):
        cepheid.MessageId.from_bytes(b"nonsense")


class Color(enum.Enum):
    RED = "RED"


@dataclasses.dataclass
class Item:
    sku: str
    price: float = 1.5


@dataclasses.dataclass
class Order:
    id: int
    items: list[Item]
    tags: dict[str, int]
    color: Color
    at: datetime
    day: date
    small: cepheid.Int32
    other: Item | None = None
    first: Order | None = None


class Person(TypedDict):
    name: str
    age: int | None


class Model(pydantic.BaseModel):
    id: int
    item: Item | None = None


ORDER = Order(
    1, [Item("a")], {"x": 2}, Color.RED, datetime(2026, 1, 2, 3, 4, 5, 6000, tzinfo=UTC), date(2026, 1, 2), 7, Item("b", 2)
)


@pytest.mark.parametrize("value", [ORDER, Model(id=3), Model(id=3, item=Item("a"))])
@pytest.mark.parametrize("schema", [cepheid.JsonSchema, cepheid.AvroSchema])
def test_records_survive_encoding(schema: Any, value: Any) -> None:
    made = schema(type(value))
    assert made.decode(made.encode(value)) == value


def test_a_typed_dict_is_a_record() -> None:
    schema = cepheid.JsonSchema(Person)
    assert schema.decode(schema.encode({"name": "Ann", "age": None})) == {"name": "Ann", "age": None}
    assert schema.definition == {
        "type": "record",
        "name": "Person",
        "fields": [{"name": "name", "type": "string"}, {"name": "age", "type": ["null", "long"]}],
    }


class Partial(TypedDict):
    name: str
    age: NotRequired[int]


@pytest.mark.parametrize("schema", [cepheid.JsonSchema, cepheid.AvroSchema])
@pytest.mark.parametrize("value", [{"name": "Ann"}, {"name": "Ann", "age": 3}])
def test_a_typed_dict_may_lack_what_is_not_required(schema: Any, value: dict[str, Any]) -> None:
    made = schema(Partial)
    assert made.decode(made.encode(value)) == value


class Dashed(pydantic.BaseModel):
    id: int = pydantic.Field(alias="order-id")


class Aliased(pydantic.BaseModel):
    id: int = pydantic.Field(alias="orderId")
    note: str = pydantic.Field(default="", validation_alias="in", serialization_alias="out")
    item: Item | None = None


@pytest.mark.parametrize("schema", [cepheid.JsonSchema, cepheid.AvroSchema])
def test_fields_of_a_model_have_their_aliases(schema: Any) -> None:
    made = schema(Aliased)
    value = Aliased.model_validate({"orderId": 3, "in": "x"})
    assert [field["name"] for field in made.definition["fields"]] == ["orderId", "out", "item"]
    assert made.decode(made.encode(value)) == value


def test_an_alias_must_be_a_name_of_avro() -> None:
    with pytest.raises(cepheid.UsageError, match="an alias must consist of letters, digits and _, got 'order-id'"):
        cepheid.JsonSchema(Dashed)


def test_the_definition_of_a_dataclass() -> None:
    fields = {field["name"]: field for field in RecordCodec(Order, binary=True).definition["fields"]}
    item = {
        "type": "record",
        "name": "Item",
        "fields": [{"name": "sku", "type": "string"}, {"name": "price", "type": "double", "default": 1.5}],
    }
    assert {name: field["type"] for name, field in fields.items()} == {
        "id": "long",
        "items": {"type": "array", "items": item},
        "tags": {"type": "map", "values": "long"},
        "color": {"type": "enum", "name": "Color", "symbols": ["RED"]},
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "day": {"type": "int", "logicalType": "date"},
        "small": "int",
        "other": ["null", "Item"],
        "first": ["null", "Order"],
    }
    assert fields["other"]["default"] is None


@dataclasses.dataclass
class WithBytes:
    data: bytes


@dataclasses.dataclass
class WithUnion:
    item: Item
    either: int | str


@pytest.mark.parametrize(
    ("record", "why"), [(WithBytes, "'WithBytes.data': JSON has no bytes"), (WithUnion, r"'WithUnion.either': .* has no Avro type")]
)
def test_a_type_that_cannot_be_a_schema_names_the_field(record: Any, why: str) -> None:
    with pytest.raises(cepheid.UsageError, match=why):
        cepheid.JsonSchema(record)


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"{", "not JSON"),
        (b"[]", "expected an object"),
        (b'{"sku": 1}', "field 'sku': expected str, got 1"),
        (b'{"price": 1.0}', "field 'sku': it is missing"),
    ],
)
def test_a_payload_that_does_not_fit_names_the_field(payload: bytes, why: str) -> None:
    with pytest.raises(cepheid.UnreadableMessageError, match=why):
        cepheid.JsonSchema(Item).decode(payload)


def test_a_value_that_does_not_fit_names_the_field() -> None:
    wrong = dataclasses.replace(ORDER, items=[Item("a"), Item(7)])  # type: ignore[arg-type]
    with pytest.raises(cepheid.UsageError, match=r"schema of Order: field 'items\[1\].sku': expected str, got 7"):
        cepheid.JsonSchema(Order).encode(wrong)
    with pytest.raises(cepheid.UsageError, match="does not fit into Avro's int"):
        cepheid.JsonSchema(Order).encode(dataclasses.replace(ORDER, small=1 << 40))


@pytest.mark.parametrize(
    ("key", "is_base64", "expected"),
    [(None, False, None), ("ä", False, "ä".encode()), ("AP8=", True, b"\x00\xff"), ("?", True, None)],
)
def test_keys_as_bytes(key: str | None, is_base64: bool, expected: bytes | None) -> None:
    metadata = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0, partition_key_b64_encoded=is_base64)
    if key is not None:
        metadata.partition_key = key
    facts = EntryFacts("topic", -1, 1, 2, 0, metadata, BYTES)
    message: cepheid.Message[bytes] = cepheid.Message(None, facts, -1, None, b"")  # type: ignore[arg-type]  # without a consumer
    if key == "?":
        with pytest.raises(cepheid.UnreadableMessageError, match="message 1:2 of topic: its key '\\?' is not base64"):
            _ = message.key_bytes
    else:
        assert message.key_bytes == expected


def test_a_lone_message_is_encoded_as_any_batch() -> None:
    """The objects that are made once leave nothing of an earlier message behind."""
    frames = SendFrames(3, "p", b"\0\1", 0, None)
    for sequence_id, payload in ((1, b"one"), (300, b"two")):
        batch = OpenBatch()
        batch.add_plain(payload)
        parts, size_bytes = frames.batch(batch, sequence_id, 1_000 + sequence_id)
        (frame,) = FrameSplitter(1 << 20).feed(b"".join(parts))
        send = parse_command(frame.command).send
        metadata, (single,) = parse_metadata(frame.tail), split_batch(split_tail(frame.tail)[1], 1)
        assert (send.producer_id, send.sequence_id, send.num_messages) == (3, sequence_id, 1)
        assert (metadata.producer_name, metadata.sequence_id, metadata.publish_time) == ("p", sequence_id, 1_000 + sequence_id)
        assert (metadata.schema_version, metadata.num_messages_in_batch) == (b"\0\1", 1)
        assert (bytes(single[2]), size_bytes) == (payload, len(batch.encode_payload()))
