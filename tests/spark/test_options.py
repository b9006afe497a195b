"""Options become a request; what is wrong with one is said with its name, its value and what would do."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from cepheid_decode import EARLIEST, LATEST, BadOptionError, Edge, MessagePosition, OnBadRecord, ReadMode, ScanTask, StorageAccess
from cepheid_security import ClientTls
from cepheid_security.oauth2 import ClientCredentials
from cepheid_spark.options import OPTIONS, SECRETS, SourceOptions, parse_options
from cepheid_spark.partitions import TaskPartition
from cepheid_spark.table_options import keep

NEEDED = {"service.url": "pulsar://127.0.0.1:6650", "topics": "t"}
T = "persistent://public/default/t"
SPARK_REDACTS = "(?i)secret|password|token|access[.]?key"  # the default of spark.redaction.regex


def parse(streaming: bool = False, **options: str) -> SourceOptions:
    return parse_options({**NEEDED, **options}, streaming=streaming)


def refusal(given: dict[str, str], *, streaming: bool = False) -> str:
    with pytest.raises(BadOptionError) as caught:
        parse_options(given, streaming=streaming)
    return str(caught.value)


@pytest.mark.parametrize("name", ["service.url", "serviceUrl", "serviceurl", "SERVICE_URL"])
def test_names_are_compared_without_case_dots_and_underscores(name: str) -> None:
    assert parse_options({name: "pulsar://b:1", "topic": "t"}, streaming=False).source.service_url == "pulsar://b:1"


@pytest.mark.parametrize(
    ("written", "nearest"),
    [("startingOffset", "startingOffsets"), ("maxbytespertriger", "maxBytesPerTrigger"), ("topicPattern", "topicsPattern")],
)
def test_an_unknown_option_is_an_error_that_names_the_nearest(written: str, nearest: str) -> None:
    message = refusal({**NEEDED, written: "1"})
    assert f"no option {written}" in message
    assert f"did you mean {nearest}?" in message


def test_a_name_far_from_all_gets_the_list_of_options() -> None:
    assert all(name in refusal({**NEEDED, "qqqqqqqq": "1"}) for name in OPTIONS)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exactlyOnce", "is for writing alone"),
        ("sinkName", "is for writing alone"),
        ("encode", "is for writing alone"),
        ("producer.batching", "not served"),
        ("authPlugin", "not served yet"),
        ("tlsValidateHostname", "always checked"),
    ],
)
def test_options_of_other_uses_are_refused_by_name(name: str, said: str) -> None:
    message = refusal({**NEEDED, name.lower(): "x"})
    assert said in message
    assert name.lower() in message.lower()


@pytest.mark.parametrize(
    ("name", "text", "accepted"),
    [
        ("targetPartitionBytes", "64 parsecs", "64mb"),
        ("targetPartitionBytes", "10kb", "from 1mb"),
        ("minPartitions", "0", "from 1 to 50000"),
        ("minPartitions", "two", "whole number"),
        ("bookieReadTimeout", "soon", "15m"),
        ("failOnDataLoss", "maybe", "true or false"),
        ("readMode", "rows", "messages or entries or typed"),
        ("columnStyle", "kafka", "plain or pulsar-spark"),
        ("onBadRecord", "ignore", "fail or null or skip"),
        ("startingTimestamp", "yesterday", "ISO 8601 with its zone"),
        ("startingTimestamp", "2024-04-01T00:00:00", "the zone is missing"),
        ("startingTimestamp", "-5", "milliseconds since 1970"),
        ("startingOffsets", "12:345", "JSON of positions by topic partition"),
        ("startingOffsets", '{"t": 5}', "JSON of positions by topic partition"),
        ("startingOffsets", '{"t": "5"}', "ledger:entry"),
        ("startingOffsets", '{"t": "--5:1"}', "ledger:entry"),
        ("endingOffsets", "earliest", "latest, or JSON"),
        ("serviceUrl", "localhost:6650", "pulsar://host:port"),
        ("topicsPattern", "[", "persistent://tenant/namespace/REGEX, a regular expression"),
        ("partitions", "5-2", "0,3,7-9"),
        ("keys", "", "a list"),
    ],
)
def test_a_bad_value_is_an_error_with_option_value_and_what_is_accepted(name: str, text: str, accepted: str) -> None:
    given = {**NEEDED, name: text}
    if name == "topicsPattern":
        del given["topics"]
    if name == "serviceUrl":
        del given["service.url"]
    message = refusal(given)
    assert name in message
    assert accepted in message
    assert "\n" not in message
    assert text in message or "'5'" in message or "'--5:1'" in message


@pytest.mark.parametrize(
    ("text", "size_bytes"), [("64mb", 64 << 20), ("1 GB", 1 << 30), ("1.5m", 3 << 19), ("4194304", 4 << 20), ("2mib", 2 << 20)]
)
def test_sizes(text: str, size_bytes: int) -> None:
    assert parse(targetPartitionBytes=text).target_task_bytes == size_bytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("500ms", 0.5), ("10s", 10.0), ("15m", 900.0), ("6h", 21600.0), ("7d", 604800.0), ("3", 3.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse(bookieReadTimeout=text).spec.settings.read_timeout_s == seconds


@pytest.mark.parametrize(
    ("text", "at_ms"),
    [
        ("1711929600000", 1_711_929_600_000),
        ("2024-04-01T00:00:00Z", 1_711_929_600_000),
        ("2024-04-01T02:00:00.123456+02:00", 1_711_929_600_123),
        ("2024-04-01", 1_711_929_600_000),
    ],
)
def test_times(text: str, at_ms: int) -> None:
    options = parse(startingTimestamp=text, eventTimeUntil=text)
    assert options.start == Edge(publish_time_ms=at_ms)
    assert options.spec.row_filter.event_until_ms == at_ms


def test_published_from_and_until_are_the_timestamps_by_another_name() -> None:
    assert parse(publishedFrom="5", publishedUntil="7") == parse(startingTimestamp="5", endingTimestamp="7")
    message = refusal({**NEEDED, "publishedFrom": "5", "startingTimestamp": "6"})
    assert "publishedFrom" in message
    assert "startingTimestamp" in message


def test_a_batch_starts_at_the_earliest_and_a_stream_at_the_latest_message() -> None:
    assert (parse().start, parse().end) == (EARLIEST, LATEST)
    assert (parse(streaming=True).start, parse(streaming=True).end) == (LATEST, LATEST)
    assert parse(streaming=True, startingOffsets="Earliest").start == EARLIEST


def test_a_batch_from_latest_is_refused() -> None:
    assert "reads nothing" in refusal({**NEEDED, "startingOffsets": "latest"})


def test_positions_go_by_full_topic_name_and_words_are_defaults() -> None:
    text = '{"t-partition-1": "12:345:7", "persistent://public/default/a": "3:0", "b": "earliest"}'
    expected = (("persistent://public/default/a", MessagePosition(3, 0)), (f"{T}-partition-1", MessagePosition(12, 345, 7)))
    assert parse(startingOffsets=text).start.positions == expected
    assert parse(startingOffsets='{"t": "earliest"}').start == EARLIEST
    assert f"the positions name {T} twice" in refusal({**NEEDED, "endingOffsets": f'{{"t": "1:1", "{T}": "1:2"}}'})


def test_a_timestamp_wins_over_offsets() -> None:
    assert parse(startingOffsets="earliest", startingTimestamp="5").start == Edge(publish_time_ms=5)


def test_a_range_that_ends_before_it_starts_is_refused() -> None:
    assert "later than" in refusal({**NEEDED, "startingTimestamp": "6", "endingTimestamp": "5"})
    assert "later than" in refusal({**NEEDED, "eventTimeFrom": "6", "eventTimeUntil": "5"})
    late, early = '{"t": "3:1", "u": "1:1"}', '{"t": "3:0", "u": "1:1"}'
    text = refusal({**NEEDED, "startingOffsets": late, "endingOffsets": early})
    assert "the start 3:1 of persistent://public/default/t is later than the end 3:0" in text
    assert parse(startingOffsets=early, endingOffsets=late).start.positions


def test_a_subscription_as_start_needs_its_name() -> None:
    for nobody in ({}, {"subscription": "none"}):
        text = refusal({**NEEDED, "startingOffsets": "subscription", **nobody}, streaming=True)
        assert "startingOffsets=subscription:NAME" in text
    assert "subscription:NAME" in refusal({**NEEDED, "startingOffsets": "subscription:"})
    assert parse(startingOffsets="subscription", subscription="billing").start == Edge(subscription="billing")


def test_exactly_one_way_to_name_topics() -> None:
    url = {"adminUrl": "http://b:8080"}
    assert "none is given" in refusal(url)
    assert "topic and topicsPattern" in refusal({**url, "topic": "a", "topicsPattern": "b.*"})
    assert parse_options({**url, "topics": "a, t/n/b,a"}, streaming=False).topics.names == (
        "persistent://public/default/a",
        "persistent://t/n/b",
    )
    assert parse_options({**url, "topicsPattern": "persistent://public/default/.*"}, streaming=False).topics.pattern is not None


@pytest.mark.parametrize("name", ["non-persistent://public/default/x", "a/b", "", "x://a/b/c"])
def test_a_name_that_is_no_persistent_topic_is_refused(name: str) -> None:
    assert "topic" in refusal({"adminUrl": "http://b:8080", "topic": name})


def test_without_an_address_the_error_names_the_three_ways() -> None:
    message = refusal({"topic": "t"})
    assert all(way in message for way in ("service.url", "admin.url", "metadata"))


def test_a_path_is_no_topic() -> None:
    assert "option('topic'" in refusal({**NEEDED, "path": "t"})


def test_lists_are_texts_or_json() -> None:
    assert parse(keys='["a,b", "c"]').spec.row_filter.keys == {"a,b", "c"}
    assert parse(keys="a, b").spec.row_filter.keys == {"a", "b"}
    assert parse(partitions="0,2-4").topics.partitions == {0, 2, 3, 4}
    assert parse(columns="value,key").columns == ("value", "key")
    assert "twice" in refusal({**NEEDED, "columns": "value,value"})


def test_modes_and_what_becomes_of_bad_records() -> None:
    options = parse(readMode="Typed", onBadRecord="skip", schemaVersion="3", failOnDataLoss="false")
    assert (options.spec.mode, options.spec.on_bad_record, options.spec.fail_on_data_loss) == (
        ReadMode.TYPED,
        OnBadRecord.SKIP,
        False,
    )
    assert options.spec.reader_version == (3).to_bytes(8, "big")
    assert parse(schemaVersion="latest").spec.reader_version is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("startingOffsets", '{"t": "1:%s"}' % ("9" * 5000)),
        ("startingOffsets", f'{{"t": "1:{1 << 63}"}}'),
        ("startingOffsets", f'{{"t": {"9" * 5000}}}'),
        ("startingOffsets", "[" * 100_000),
        ("endingOffsets", '{"t":' * 100_000),
        ("keys", "[" * 100_000),
        ("startingTimestamp", "9" * 5000),
    ],
    ids=lambda text: text[:20],
)
def test_hostile_numbers_and_brackets_are_refused_in_a_short_line(name: str, text: str) -> None:
    message = refusal({**NEEDED, name: text})
    assert name in message
    assert len(message) < 500


def test_a_version_of_the_schema_is_of_typed_rows_alone() -> None:
    for mode in ("messages", "entries"):
        assert "only rows of readMode=typed" in refusal({**NEEDED, "readMode": mode, "schemaVersion": "77"})
        assert parse(readMode=mode, schemaVersion="Latest ").spec.reader_version is None
    assert "only rows of readMode=typed" in refusal({**NEEDED, "schemaVersion": "0"})
    message = refusal({**NEEDED, "readMode": "typed", "schemaVersion": "newest"})
    assert all(part in message for part in ("schemaVersion", "'newest'", "whole number"))


@pytest.mark.parametrize("name", ["keys", "eventTimeFrom", "eventTimeUntil"])
def test_what_entries_do_not_have_does_not_choose_among_them(name: str) -> None:
    assert "those of messages" in refusal({**NEEDED, "readMode": "entries", name: "5"})
    assert parse(readMode="entries", startingTimestamp="5", endingTimestamp="6").spec.mode is ReadMode.ENTRIES


def test_streaming_options_have_their_defaults_and_values() -> None:
    options = parse(streaming=True)
    assert (options.max_bytes_per_trigger, options.max_entries_per_trigger, options.min_bytes_per_trigger) == (None, None, None)
    assert (options.max_trigger_delay_s, options.lease_ttl_s, options.topic_discovery_s) == (900.0, 7 * 86400.0, 30.0)
    assert (options.subscription, options.has_lease) == (None, True)
    assert parse().lease_ttl_s == 6 * 3600.0
    options = parse(
        streaming=True, subscription="none", maxBytesPerTrigger="1gb", maxEntriesPerTrigger="10", minBytesPerTrigger="1mb"
    )
    assert (options.subscription, options.has_lease) == (None, False)
    assert (options.max_bytes_per_trigger, options.max_entries_per_trigger, options.min_bytes_per_trigger) == (1 << 30, 10, 1 << 20)


def test_the_request_carries_what_was_asked() -> None:
    options = parse(rack="r1", readAttempts="2", unreachableTimeout="90s", minPartitions="7", timestampSkew="5s", keys="k")
    request = options.reading(("value",))
    assert request.spec.columns == ("value",)
    assert request.spec.settings.rack == "r1"
    assert request.spec.settings.read_attempts == 2
    assert request.spec.settings.unreachable_s == 90.0
    assert parse(unreachableTimeout="0").spec.settings.unreachable_s == 0.0
    assert request.spec.row_filter.keys == {"k"}
    assert (request.min_tasks, request.timestamp_skew_ms) == (7, 5000)
    assert request.spec.plan_source == request.source == options.source


def test_a_token_comes_from_the_environment_or_a_file_and_shows_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "CEPHEID_TEST_TOKEN", "hush-1")
    (tmp_path / "token").write_text("hush-2\n")
    by_environment, by_file = parse(tokenEnv="CEPHEID_TEST_TOKEN"), parse(tokenFile=str(tmp_path / "token"))
    shown = [each.source.secrets.authorization() for each in (by_environment, by_file)]
    assert shown == ["Bearer hush-1", "Bearer hush-2"]
    assert "hush" not in repr(by_environment) + repr(by_file.reading(("value",)))
    assert "exclude each other" in refusal({**NEEDED, "token": "hush-3", "tokenFile": "x"})
    assert "hush" not in refusal({**NEEDED, "token": "hush-3", "tokenFile": "x"})
    assert "no variable" in refusal({**NEEDED, "tokenEnv": "CEPHEID_NO_SUCH"})
    assert "cannot read" in refusal({**NEEDED, "tokenFile": str(tmp_path / "none")})


def test_a_user_with_a_password_and_a_client_of_an_issuer_come_from_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "CEPHEID_TEST_PASSWORD", "hush-1")
    (tmp_path / "password").write_text("hush-2\n")
    (tmp_path / "key").write_text('{"issuer_url": "https://a", "client_id": "c", "client_secret": "hush-3"}')
    ways = ({"password": "hush-0"}, {"passwordEnv": "CEPHEID_TEST_PASSWORD"}, {"passwordFile": str(tmp_path / "password")})
    read = [parse(user="ann", **way) for way in ways]
    assert [options.source.secrets.password for options in read] == [("ann", f"hush-{number}") for number in range(3)]
    issuer = parse(oauth2File=str(tmp_path / "key"), oauth2Audience="cluster")
    assert isinstance(issuer.source.secrets.token, ClientCredentials)
    assert issuer.source.secrets.token.audience == "cluster"
    assert "hush" not in "".join(repr(options) for options in [*read, issuer])
    for half in ({"user": "ann"}, {"password": "hush"}, {"user": "ann", "password": "hush", "passwordEnv": "X"}):
        assert "belong together" in refusal({**NEEDED, **half})
    assert "exclude each other" in refusal({**NEEDED, "user": "ann", "password": "hush", "token": "hush"})
    assert "is for the tokens of oauth2File" in refusal({**NEEDED, "oauth2Audience": "x"})
    assert "oauth2File" in refusal({**NEEDED, "oauth2File": "/no/such"})


def test_credentials_of_the_object_store_show_nowhere() -> None:
    given = {"storage.accessKey": "hush-1", "storage.secretKey": "hush-2", "storage.sessionToken": "hush-3", "storageRegion": "eu"}
    options = parse(**given)
    assert options.spec.storage == StorageAccess("hush-1", "hush-2", "hush-3", None, "eu")
    spec = options.reading(("value",)).spec
    assert spec.storage == options.spec.storage, "tasks have them"
    partition = TaskPartition(ScanTask((), ()), spec)
    assert not [text for text in (repr(options), repr(spec), repr(partition), repr(options.reading(("value",)))) if "hush" in text]
    assert all(re.search(SPARK_REDACTS, name) for name in SECRETS), "Spark shows them in its event log"


@pytest.mark.parametrize("lacking", ["storageAccessKey", "storageSecretKey"])
def test_half_of_the_credentials_are_refused(lacking: str) -> None:
    whole = {"storageAccessKey": "hush", "storageSecretKey": "hush", "storageSessionToken": "hush"}
    message = refusal({**NEEDED, **{name: text for name, text in whole.items() if name != lacking}})
    assert "storageSecretKey" in message
    assert "hush" not in message


@pytest.mark.parametrize("name", ["storage.secretKey", "STORAGEACCESSKEY", "storage.session.token"])
def test_no_credentials_are_written_into_a_catalog(name: str) -> None:
    with pytest.raises(BadOptionError, match=f"leave {name} out"):
        keep(StructType([StructField("key", StringType())]), {name: "hush"})


def test_files_of_tls_and_the_token_come_from_options_or_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CEPHEID_TOKEN", "of-the-environment")
    secured = {"service.url": "pulsar+ssl://a:6651", "topic": "t"}
    plain = parse_options(secured, streaming=False)
    assert plain.source.secrets.token == "of-the-environment"
    assert (plain.source.tls, plain.spec.settings.tls) == (None, None)
    files = {"tlsTrustCerts": "/ca.pem", "tlsCertFile": "/c.pem", "tlsKeyFile": "/k.pem"}
    given = parse_options({**secured, **files, "token": "own"}, streaming=False)
    assert given.source.secrets.token == "own"
    assert given.source.tls == given.spec.settings.tls == ClientTls("/ca.pem", "/c.pem", "/k.pem")
    assert "must be given together" in refusal({**secured, "tlsCertFile": "/c.pem"})
    monkeypatch.setenv("CEPHEID_TOKEN_FILE", "/no/such/file")
    assert "CEPHEID_TOKEN_FILE names /no/such/file" in refusal(secured)
