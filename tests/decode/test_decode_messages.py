from __future__ import annotations

import datetime
import itertools
import random
from typing import Any

import pytest

from cepheid_decode import BadRecordError, OnBadRecord, ReadMode, ReadSettings, RowFilter, ScanCounters, ScanSpec, message_decoder
from cepheid_decode.columns import DEFAULT_MESSAGE_COLUMNS
from cepheid_decode.decode_entries import MAX_BATCH_MESSAGES
from cepheid_decode.message_decoder import MessageDecoder
from cepheid_wire import encode_batch, encode_tail
from cepheid_wire import pulsar_api_pb2 as pb
from tests.decode.decode_reference import (
    ALL_COLUMNS,
    EPOCH,
    MAX_TIME_MS,
    batched,
    compress,
    decode,
    groups_of,
    message,
    metadata,
    piece,
    reference_rows,
    single,
    values_before_failure,
)

CODECS = (pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY)


def some_messages(count: int, seed: int, **every: Any) -> list[tuple[pb.SingleMessageMetadata, bytes]]:
    chance = random.Random(seed)
    made = []
    for index in range(count):
        fields: dict[str, Any] = {"sequence_id": chance.choice((index, 300 + index, 1 << 40)), **every}
        if chance.random() < 0.7:
            fields["partition_key"] = chance.choice(("k", "key-é-12", "", "a" * 200))
        if chance.random() < 0.3:
            fields["properties"] = {f"p{i}": chance.choice(("", "v", "✈")) for i in range(chance.randrange(1, 4))}
        if chance.random() < 0.3:
            fields["event_time"] = chance.choice((0, 1, 1_600_000_000_000))
        if chance.random() < 0.2:
            fields["ordering_key"] = b"\xff\x00o"
        if chance.random() < 0.2:
            fields["null_value"] = True
        if chance.random() < 0.1:
            fields["compacted_out"] = True
        made.append(message(chance.randbytes(chance.choice((0, 1, 100, 300))) if not fields.get("null_value") else b"", **fields))
    return made


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
@pytest.mark.parametrize("count", [1, 2, 40, 300])
def test_batches_of_every_codec_read_as_protobuf_reads_them(codec: int, count: int) -> None:
    tails = [
        batched(
            some_messages(count, seed),
            compression=codec,
            sequence_id=seed,
            schema_version=b"\0\1",
            replicated_from="r1",
        )
        for seed in range(5)
    ]
    assert decode(tails) == reference_rows(tails)


@pytest.mark.parametrize("codec", CODECS, ids=pb.CompressionType.Name)
def test_messages_alone_of_every_codec_read_as_protobuf_reads_them(codec: int) -> None:
    tails = []
    for seed, (inner, payload) in enumerate(some_messages(60, 1)):
        fields: dict[str, Any] = {
            name.name: value
            for name, value in inner.ListFields()
            if name.name not in ("payload_size", "compacted_out", "properties")
        }
        described = metadata(compression=codec, **{**fields, "properties": {p.key: p.value for p in inner.properties}})
        described.publish_time += seed
        tails.append(encode_tail(described, compress(codec, payload, described)))
    assert decode(tails) == reference_rows(tails)
    assert decode(tails, per_group=7) == reference_rows(tails)


def test_batches_and_messages_alone_keep_the_order_of_the_topic() -> None:
    tails = [
        batched(some_messages(30, 1)),
        single(b"a", partition_key="k1", properties={"x": "y"}, event_time=9),
        batched(some_messages(3, 2), compression=pb.ZSTD),
        single(b"b", compression=pb.NONE, null_value=True, schema_version=b"\1"),
        encode_tail(metadata(compression=pb.LZ4, uncompressed_size=400), compress(pb.LZ4, b"long" * 100)),
        batched(some_messages(300, 3)),
    ]
    assert decode(tails) == reference_rows(tails)


def test_every_column_alone_is_that_of_all_together() -> None:
    tails = [batched(some_messages(30, 1)), single(b"a", partition_key="k1"), batched(some_messages(3, 2), compression=pb.ZSTD)]
    together = decode(tails)
    for name in ALL_COLUMNS:
        assert decode(tails, [name]) == [{name: row[name]} for row in together]


def test_default_columns_are_the_reference_s() -> None:
    assert DEFAULT_MESSAGE_COLUMNS == (
        "key", "value", "topic", "partition", "ledger_id", "entry_id", "batch_index", "publish_time", "event_time",
        "producer_name", "sequence_id", "properties",
    )  # fmt: skip


def test_what_the_broker_put_in_front_is_stepped_over() -> None:
    broker = pb.BrokerEntryMetadata(broker_timestamp=1, index=7).SerializeToString()
    plain = [single(b"a", partition_key="k"), batched(some_messages(3, 1)), single(b"b")[6:]]  # the last one without checksum
    tails = [b"\x0e\x02" + len(broker).to_bytes(4, "big") + broker + tail for tail in plain]
    assert decode(tails) == decode(plain) == reference_rows(plain)


def test_a_key_that_is_bytes_is_shown_as_sent_and_decoded() -> None:
    tails = [
        single(partition_key="AP8=", partition_key_b64_encoded=True),
        single(partition_key="AP8="),
        batched(
            [
                message(partition_key="AQ==", partition_key_b64_encoded=True),
                message(),
                message(null_partition_key=True, partition_key=""),
            ]
        ),
    ]
    rows = decode(tails, ["key", "key_bytes"])
    assert [(row["key"], row["key_bytes"]) for row in rows] == [
        ("AP8=", b"\x00\xff"), ("AP8=", b"AP8="), ("AQ==", b"\x01"), (None, None), (None, None)
    ]  # fmt: skip


def test_markers_and_what_compaction_took_out_are_left_out_and_counted() -> None:
    counters = ScanCounters()
    tails = [
        single(b"marker", marker_type=10),
        batched([message(b"a"), message(b"", compacted_out=True), message(b"c")]),
        single(b"d"),
    ]
    assert [row["value"] for row in decode(tails, ["value"], counters=counters)] == [b"a", b"c", b"d"]
    assert (counters.markers, counters.compacted_out, counters.messages, counters.bad_records) == (1, 1, 3, 0)


def test_times_beyond_what_a_timestamp_holds_read_as_null() -> None:
    (row,) = decode([single(publish_time=(1 << 64) - 1, event_time=1 << 62)], ["publish_time", "event_time"])
    assert row == {"publish_time": None, "event_time": None}


def test_a_sequence_id_that_a_message_does_not_have_is_its_batch_s() -> None:
    rows = decode([batched([message(sequence_id=8), message()], sequence_id=7)], ["sequence_id"])
    assert [row["sequence_id"] for row in rows] == [8, 7]


ENCRYPTED = metadata(encryption_algo="AES", encryption_param=b"\1\2", partition_key="k", compression=pb.LZ4, uncompressed_size=99)
ENCRYPTED.encryption_keys.add(key="team", value=b"\xff", metadata=[pb.KeyValue(key="v", value="2")])

BAD = {
    "no metadata": (b"\x00\x00\x00\x09abc", "too few for the metadata"),
    "broken metadata": (b"\x00\x00\x00\x02\x0a\x09", "2 bytes are not a valid MessageMetadata"),
    "no producer": (b"\x00\x00\x00\x00", "lacks producer_name"),
    "lz4": (encode_tail(metadata(compression=pb.LZ4, uncompressed_size=5), b"\xff\xff"), "LZ4 payload"),
    "zlib": (encode_tail(metadata(compression=pb.ZLIB, uncompressed_size=5), b"\xff\xff"), "ZLIB payload"),
    "zstd": (encode_tail(metadata(compression=pb.ZSTD, uncompressed_size=5), b"\xff\xff"), "ZSTD payload"),
    "snappy": (encode_tail(metadata(compression=pb.SNAPPY, uncompressed_size=5), b"\xff\xff"), "SNAPPY payload"),
    "a short one": (encode_tail(metadata(compression=pb.LZ4, uncompressed_size=9), compress(pb.LZ4, b"12345678")), "has 8 bytes"),
    "a long one": (encode_tail(metadata(compression=pb.ZLIB, uncompressed_size=7), compress(pb.ZLIB, b"12345678")), "ZLIB payload"),
    "too much": (encode_tail(metadata(compression=pb.ZSTD, uncompressed_size=1 << 30), b""), "the limit is 67108864"),
    "a codec of the future": (b"\x00\x00\x00\x09\x0a\x01p\x10\x00\x18\x01\x40\x07value", "compression 7 is unknown"),
    "no messages": (single(num_messages_in_batch=0), "a batch of 0 messages"),
    "fewer than none": (single(num_messages_in_batch=-3), "a batch of -3 messages"),
    "a million": (single(num_messages_in_batch=1_000_000), "a batch of 1000000 messages in 5 bytes"),
    "more than are read": (
        single(num_messages_in_batch=MAX_BATCH_MESSAGES + 1),
        "a batch of 2097153 messages: only 1 to 2097152 are supported",
    ),
    "one too many": (encode_tail(metadata(num_messages_in_batch=3), encode_batch([message(b"x" * 9)] * 2)), "message 2"),
    "one too few": (encode_tail(metadata(num_messages_in_batch=1), encode_batch([message()] * 2)), "bytes after a batch of 1"),
    "one too early": (encode_tail(metadata(num_messages_in_batch=2), b"x" + encode_batch([message()] * 2)), "message 0"),
    "encrypted": (encode_tail(ENCRYPTED, b"secret"), "its payload is encrypted"),
    "transaction": (single(txnid_least_bits=1, txnid_most_bits=0), "it belongs to a transaction"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_entry_fails_with_its_place_or_is_left_out_or_shown_as_null(name: str) -> None:
    bad, reason = BAD[name]
    tails = [single(b"before"), bad, batched([message(b"after")])]
    with pytest.raises(BadRecordError, match=reason) as caught:
        decode(tails)
    assert caught.value.facts == {"topic": piece(1).topic, "position": "12:1"}
    assert "12:1 of persistent://public/default/t-partition-3" in str(caught.value)
    skipped, shown = ScanCounters(), ScanCounters()
    assert [row["value"] for row in decode(tails, on_bad_record=OnBadRecord.SKIP, counters=skipped)] == [b"before", b"after"]
    rows = decode(tails, on_bad_record=OnBadRecord.NULL, counters=shown)
    assert [row["entry_id"] for row in rows] == [0, 1, 2]
    assert rows[1]["value"] == (b"secret" if name == "encrypted" else None)
    assert rows[1]["batch_index"] is None
    assert (skipped.bad_records, shown.bad_records) == (1, 1)
    assert (skipped.messages, shown.messages) == (2, 3)


@pytest.mark.parametrize(
    ("bad", "rows"),
    [
        (encode_tail(metadata(compression=pb.LZ4, uncompressed_size=5), b"\xff\xff"), 3),
        (batched([message(b"3"), message(b"4", partition_key="TEXT"), message(b"5")]).replace(b"TEXT", b"\xff\xfe\xfd\xfc")[6:], 4),
    ],
    ids=["an entry", "a message in a batch"],
)
def test_what_is_before_a_bad_record_is_given_out_before_it_fails(bad: bytes, rows: int) -> None:
    tails = [single(b"0"), batched([message(b"1"), message(b"2")], compression=pb.ZSTD), bad, single(b"after")]
    counters = ScanCounters()
    decoder = MessageDecoder(ScanSpec(ReadMode.MESSAGES, ("value", "key")), counters, lambda asked, count: iter(()))
    found, failure = values_before_failure(decoder.decode(piece(4), groups_of(tails)))
    assert found == [b"%d" % number for number in range(rows)]
    assert "12:2" in failure
    assert counters.messages == rows


def test_an_encrypted_message_is_shown_with_what_decrypting_it_takes() -> None:
    (row,) = decode([encode_tail(ENCRYPTED, b"secret")], on_bad_record=OnBadRecord.NULL)
    assert (row["key"], row["value"]) == ("k", b"secret")
    assert row["properties"] == {
        "encryption.algorithm": "AES",
        "encryption.param": "AQI=",
        "encryption.compression": "LZ4",
        "encryption.uncompressed_size": "99",
        "encryption.key.team": "/w==",
        "encryption.key.team.v": "2",
    }


def test_an_encrypted_batch_is_one_row() -> None:
    described = metadata(partition_key="of the first", num_messages_in_batch=3)
    described.encryption_keys.add(key="team", value=b"\xff")
    (row,) = decode([encode_tail(described, b"secret")], on_bad_record=OnBadRecord.NULL)
    assert (row["key"], row["value"], row["properties"]["encryption.num_messages"]) == (None, b"secret", "3")


def not_text(tail: bytes) -> bytes:
    return tail.replace(b"TEXT", b"\xff\xfe\xfd\xfc")[6:]  # without the checksum, which is another now


@pytest.mark.parametrize(
    ("column", "tail"),
    [
        ("key", single(partition_key="TEXT")),
        ("key", batched([message(), message(partition_key="TEXT")])),
        ("producer_name", single(producer_name="TEXT")),
        ("replicated_from", single(replicated_from="TEXT")),
        ("properties", single(properties={"a": "b", "TEXT": "c"})),
        ("properties", batched([message(properties={"a": "TEXT"}), message(properties={"a": "b"})])),
        ("key_bytes", single(partition_key="TEXT", partition_key_b64_encoded=True)),
    ],
)
def test_text_that_is_none_is_bad_where_its_column_is_asked_for(column: str, tail: bytes) -> None:
    tails = [single(), not_text(tail), single()]
    count = len(decode(tails, ["value"]))
    with pytest.raises(BadRecordError, match="12:1"):
        decode(tails, [column])
    assert len(decode(tails, ["value", column], on_bad_record=OnBadRecord.SKIP)) == count - 1
    counters = ScanCounters()
    rows = decode(tails, ["value", column], on_bad_record=OnBadRecord.NULL, counters=counters)
    assert [row["value"] for row in rows] == [b"value"] * count
    assert counters.bad_records == 1
    if column != "properties":
        assert any(row[column] is None for row in rows)


def test_a_piece_begins_and_ends_inside_batches() -> None:
    tails = [batched([message(b"%d" % i) for i in range(4)]) for _ in range(3)]
    of_piece = piece(3, first_batch_index=2, end_batch_index=1)
    assert [row["value"] for row in decode(tails, ["value"], of_piece=of_piece)] == [b"2", b"3", b"0", b"1", b"2", b"3", b"0"]
    alone = piece(2, first_batch_index=1, end_batch_index=0)
    assert decode([single(), single()], of_piece=alone) == []


def test_a_piece_of_one_entry_may_begin_and_end_inside_it() -> None:
    tails = [batched([message(b"%d" % i) for i in range(5)])]
    assert [row["value"] for row in decode(tails, ["value"], of_piece=piece(1, first_batch_index=1, end_batch_index=3))] == [
        b"1",
        b"2",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("compression", [pb.NONE, pb.ZSTD])
def test_a_filter_keeps_the_rows_that_the_same_conditions_keep(compression: int) -> None:
    tails = [
        *(batched(some_messages(20, seed), compression=compression, publish_time=1000 + seed) for seed in range(10)),
        *(single(b"%d" % i, partition_key="k", event_time=1_600_000_000_000, publish_time=995 + i) for i in range(10)),
    ]
    everything = reference_rows(tails)

    def ms(value: Any) -> int | None:
        return None if value is None else round(value.timestamp() * 1000)

    for publish, event, keys in itertools.product(
        ((None, None), (1003, None), (None, 1003), (1002, 1005)),
        ((None, None), (2, None), (None, 2)),
        (None, {"k", "x"}, {"key-é-12"}),
    ):
        wanted = RowFilter(*publish, *event, keys=None if keys is None else frozenset(keys))
        expected = [
            row
            for row in everything
            if (publish[0] is None or ms(row["publish_time"]) >= publish[0])
            and (publish[1] is None or ms(row["publish_time"]) < publish[1])
            and (event[0] is None or (row["event_time"] is not None and ms(row["event_time"]) >= event[0]))
            and (event[1] is None or (row["event_time"] is not None and ms(row["event_time"]) < event[1]))
            and (keys is None or row["key"] in keys)
        ]
        assert decode(tails, row_filter=wanted) == expected
        assert decode(tails, ["value"], row_filter=wanted) == [{"value": row["value"]} for row in expected]


@pytest.mark.parametrize("wanted", [RowFilter(event_from_ms=1), RowFilter(event_until_ms=MAX_TIME_MS)])
def test_a_row_without_an_event_time_to_show_is_within_no_event_times(wanted: RowFilter) -> None:
    tails = [single(event_time=ms) for ms in (0, 5, MAX_TIME_MS + 1, 1 << 62, (1 << 64) - 1)]
    shown = decode([*tails, batched([message(event_time=ms) for ms in (7, MAX_TIME_MS + 1)])], ["event_time"], row_filter=wanted)
    assert [row["event_time"].microsecond // 1000 for row in shown] == [5, 7]


def test_an_entry_outside_the_filter_s_time_is_not_looked_into() -> None:
    broken = encode_tail(metadata(num_messages_in_batch=3, publish_time=100), b"x" * 40)
    assert len(decode([broken, single(publish_time=200)], row_filter=RowFilter(publish_from_ms=150))) == 1


def test_payloads_that_unpack_to_much_come_in_several_batches() -> None:
    large = [bytes([number]) * (10 << 20) for number in range(5)]
    tails = [encode_tail(metadata(compression=pb.ZSTD, uncompressed_size=len(each)), compress(pb.ZSTD, each)) for each in large]
    assert [row["value"] == each for row, each in zip(decode(tails, ["value"]), large, strict=True)] == [True] * 5


@pytest.mark.parametrize(("limit_bytes", "limit_messages"), [(1, 1 << 15), (1000, 1 << 15), (16 << 20, 1), (16 << 20, 100)])
def test_rows_do_not_depend_on_how_many_are_decoded_at_once(
    monkeypatch: pytest.MonkeyPatch, limit_bytes: int, limit_messages: int
) -> None:
    tails = [batched(some_messages(40, seed), compression=CODECS[seed % 5]) for seed in range(20)]
    tails[7:7] = [single(b"alone", partition_key="k"), encode_tail(metadata(num_messages_in_batch=2), b"broken")]
    monkeypatch.setattr(message_decoder, "BATCH_BYTES", limit_bytes)
    settings = ReadSettings(decode_bytes=min(limit_bytes, ReadSettings().decode_bytes))
    monkeypatch.setattr(message_decoder, "BATCH_MESSAGES", limit_messages)
    expected = reference_rows([*tails[:8], tails[9], *tails[9:]])
    expected = [row for row in expected if row["entry_id"] != 8]
    assert decode(tails, on_bad_record=OnBadRecord.SKIP, settings=settings) == expected


def test_a_payload_of_zeros_is_not_taken_for_messages() -> None:
    for size in (1, 3, 4, 90):
        tails = [batched([message(bytes(size)) for _ in range(50)]), batched([message(b"\0\0\0\x04\x18\x01" * size)] * 5)]
        assert decode(tails) == reference_rows(tails)


@pytest.mark.parametrize("codec", CODECS)
def test_a_message_without_bytes_at_the_end_of_what_is_stored(codec: int) -> None:
    """What is unpacked begins where the stored bytes end: there lies the empty one, too."""
    described = metadata(compression=codec)
    tails = [encode_tail(described, compress(codec, b"packed", described)), batched([message(b"a"), message(b"")])]
    assert decode(tails) == reference_rows(tails)


def test_a_batch_with_more_messages_than_columns_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    tails = [single(b"alone", partition_key="k"), batched(some_messages(130, 1)), batched(some_messages(7, 2))]
    whole = decode(tails)
    assert whole == reference_rows(tails)
    sizes: list[int] = []
    count_rows = message_decoder.DecodedMessages.__init__

    def counted(self: Any, rows: Any) -> None:
        sizes.append(len(rows))
        count_rows(self, rows)

    monkeypatch.setattr(message_decoder, "MAX_ROWS", 50)
    monkeypatch.setattr(message_decoder.DecodedMessages, "__init__", counted)
    assert decode(tails) == whole
    assert max(sizes) == 50
    assert decode(tails, row_filter=RowFilter(keys=frozenset({"k"}))) == [row for row in whole if row["key"] == "k"]


def test_a_batch_shown_as_one_row_has_nothing_of_its_first_message() -> None:
    """What clients copy from the first message into the batch's metadata says nothing about the others."""
    of_first = {"partition_key": "k", "ordering_key": b"o", "event_time": 1_600_000_000_000, "properties": {"a": "b"}}
    tails = [encode_tail(metadata(num_messages_in_batch=2, **of_first), b"no batch")]
    names = ["key", "key_bytes", "ordering_key", "event_time", "value"]
    (row,) = decode(tails, [*names, "properties"], on_bad_record=OnBadRecord.NULL)
    assert row == {**dict.fromkeys(names), "properties": {}}


def test_times_end_with_the_last_millisecond_of_the_year_9999() -> None:
    times = [decode([single(publish_time=ms, event_time=ms)])[0] for ms in (1, MAX_TIME_MS, MAX_TIME_MS + 1)]
    shown = [EPOCH + datetime.timedelta(milliseconds=ms) for ms in (1, MAX_TIME_MS)]
    assert [row["event_time"] for row in times] == [row["publish_time"] for row in times] == [*shown, None]


def test_a_key_that_is_null_is_none_of_the_keys_that_are_wanted() -> None:
    tails = [
        batched([message(b"0", partition_key="k"), message(b"1", partition_key="k", null_partition_key=True)]),
        single(b"2", partition_key="k", null_partition_key=True),
    ]
    assert [row["value"] for row in decode(tails, row_filter=RowFilter(keys=frozenset({"k"})))] == [b"0"]
