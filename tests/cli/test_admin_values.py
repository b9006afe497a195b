"""How the admin commands read values, and how they say why a subscription stands still."""

from __future__ import annotations

import pytest

from cepheid_cli.admin.offload_words import offload_body, shown_offload
from cepheid_cli.admin.policy_words import WORDS, word
from cepheid_cli.admin.subscriptions import why_lines
from cepheid_cli.admin.units import (
    BadValueError,
    duration_s,
    pairs,
    position,
    shown_bytes,
    shown_duration,
    size_bytes,
    switch,
    time_ms,
)
from cepheid_cli.tiered import problem_lines
from tests.plain_admin import AdminClient, AdminUnreachableError, UsageError, subscription_path, topic_path


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604_800), ("1w", 604_800), ("unlimited", -1), ("0s", 0)]
)
def test_durations(text: str, seconds: int) -> None:
    assert duration_s(text) == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("7B", 7), ("500MB", 500 << 20), ("10GB", 10 << 30), ("2GiB", 2 << 30), ("1k", 1024), ("unlimited", -1)],
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "7", "s", "-7s", "7 s", "7y", "1.5h"])
def test_what_is_no_duration_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(BadValueError, match="is not a duration"):
        duration_s(text)


@pytest.mark.parametrize("text", ["", "GB", "-1", "7 GB", "1.5GB", "7XB"])
def test_what_is_no_size_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(BadValueError, match="is not a size"):
        size_bytes(text)


def test_positions() -> None:
    assert position("12:34") == {"ledgerId": 12, "entryId": 34, "partitionIndex": -1}
    assert position("12:-1")["entryId"] == -1
    assert position("earliest")["ledgerId"] == -1
    assert position("latest")["ledgerId"] == (1 << 63) - 1
    for text in ("", "12", "12:", ":3", "a:b", "12:34:5"):
        with pytest.raises(BadValueError, match="is not a position"):
            position(text)


def test_times() -> None:
    assert time_ms("2026-05-01T12:00:00+00:00") == 1_777_636_800_000
    assert time_ms("2026-05-01T12:00:00+02:00") == 1_777_629_600_000
    assert time_ms("-15m") < time_ms("-14m")
    with pytest.raises(BadValueError, match="is not a time"):
        time_ms("yesterday")


def test_pairs_and_switches() -> None:
    assert pairs(["a=b", "c=d=e"]) == {"a": "b", "c": "d=e"}
    for text in ("a", "=b"):
        with pytest.raises(BadValueError, match="NAME=VALUE"):
            pairs([text])
    assert switch("on") is True
    assert switch("off") is False
    with pytest.raises(BadValueError, match="neither on nor off"):
        switch("yes")


def test_shown_figures() -> None:
    assert [shown_bytes(n) for n in (0, 1023, 1536, 3 << 30, -1, None)] == ["0 B", "1023 B", "1.5 KB", "3.0 GB", "-", "-"]
    assert [shown_duration(s) for s in (0.25, 45, 600, 7200, 259_200, -1)] == ["0.2 s", "45 s", "10 min", "2 h", "3 d", "-"]


@pytest.mark.parametrize(
    ("name", "text", "body"),
    [
        ("retention", "7d,100GB", {"retentionTimeInMinutes": 10_080, "retentionSizeInMB": 102_400}),
        ("retention", "unlimited,unlimited", {"retentionTimeInMinutes": -1, "retentionSizeInMB": -1}),
        ("ttl", "15m", 900),
        ("size-quota", "10GB:evict", {"limitSize": 10 << 30, "limitTime": -1, "policy": "consumer_backlog_eviction"}),
        ("age-quota", "1h:hold", {"limitSize": -1, "limitTime": 3600, "policy": "producer_request_hold"}),
        ("dedup", "on", True),
        ("max-unacked-per-consumer", "0", 0),
        ("schema-compatibility", "full-transitive", "FULL_TRANSITIVE"),
    ],
)
def test_policy_values(name: str, text: str, body: object) -> None:
    assert word(name).read(text) == body


@pytest.mark.parametrize("name", sorted(set(WORDS) - {"schema-compatibility"}))  # whose names the server knows
def test_a_bad_policy_value_says_what_to_write(name: str) -> None:
    with pytest.raises(BadValueError, match=r"write|neither"):
        word(name).read("nonsense:nonsense")


def test_an_unknown_policy_is_named_with_those_there_are() -> None:
    with pytest.raises(BadValueError, match="'retenton' is not a policy; there are retention, ttl"):
        word("retenton")


def test_names_become_one_segment_each() -> None:
    assert topic_path("a b") == "/admin/v2/persistent/public/default/a%20b"
    assert topic_path("non-persistent://t/n/x") == "/admin/v2/non-persistent/t/n/x"
    assert subscription_path("t", "a/b%") == "/admin/v2/persistent/public/default/t/subscription/a%252Fb%2525"


def test_why_names_what_holds_it_and_what_ends_it() -> None:
    reason = {
        "reason": "keys wait for an earlier consumer's acknowledgements",
        "consumer": "worker-3",
        "key": "4711",
        "message_id": "7:42",
        "until": "worker-3 acknowledges 7:42 or leaves",
        "since_s": 90.0,
        "details": "",
    }
    answer = {"type": "Key_Shared", "delivering": False, "reasons": [reason], "backlog_entries": 12}
    answer["consumers"] = [
        {"name": "worker-3", "permits": 5, "unacked_messages": 7, "blocked": False},
        {"name": "worker-4", "permits": 0, "unacked_messages": 50_000, "blocked": True},
    ]
    assert why_lines("persistent://public/default/orders", "billing", answer) == [
        "billing of persistent://public/default/orders: Key_Shared, 2 consumers, backlog 12 entries",
        "  worker-3: 5 permits, 7 unacknowledged",
        "  worker-4: 0 permits, 50000 unacknowledged, blocked",
        "- keys wait for an earlier consumer's acknowledgements",
        "    consumer: worker-3",
        "    key: 4711",
        "    message: 7:42",
        "    since: 90 s",
        "    ends when worker-3 acknowledges 7:42 or leaves",
    ]
    delivering = {**answer, "delivering": True, "reasons": []}
    assert why_lines("t", "s", delivering)[3:] == ["It is delivering."]


@pytest.mark.parametrize("url", ["", "localhost:8080", "pulsar://localhost:6650"])
def test_what_is_no_admin_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="is not an admin address"):
        AdminClient(url)


def test_nobody_there() -> None:
    with pytest.raises(AdminUnreachableError, match=r"no admin API answers at http://127\.0\.0\.1:1: "):
        AdminClient("http://127.0.0.1:1").get("/admin/v2/tenants")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a/b?region=eu-west-1&endpoint=http://minio:9000,after-size=1GB,after-age=1d,keep=1h,read-from=objects",
        "gs://bucket,after-size=0,keep=90s",
        "abfs://container/x,after-size=off,after-age=off",
        "file:///mnt/archive,after-age=36h,read-from=bookies",
        "after-size=1500",
    ],
)
def test_an_offload_policy_is_read_and_shown_alike(text: str) -> None:
    assert shown_offload(offload_body(text)) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "a part of the value is empty: write s3://bucket/prefix,after-size=1GB"),
        ("s3://bucket,", "a part of the value is empty"),
        ("bucket", "'bucket' is not the URL of an object store: write s3://"),
        ("ftp://bucket,keep=1h", "unknown scheme 'ftp'"),
        ("s3://,keep=1h", "names no bucket: write s3://bucket/prefix"),
        ("s3://id:hush@bucket", "before an @"),
        ("s3://bucket?secret_access_key=hush", "carries 'secret_access_key'"),
        ("s3://bucket,gs://other", "'gs://other' is a second destination"),
        ("s3://bucket,after-sise=1GB", "unknown option 'after-sise': .*; did you mean after-size"),
        ("s3://bucket,colour=red", "unknown option 'colour': after-size, after-age, keep, read-from are possible$"),
        ("s3://bucket,after-size=-1GB", "after-size: '-1GB' is not a size"),
        ("s3://bucket,after-size=1GB,after-size=2GB", "after-size is given twice"),
        ("s3://bucket,after-age=1", "after-age: '1' is not a duration"),
        ("s3://bucket,after-age=-1d", "after-age: '-1d' is not a duration"),
        ("s3://bucket,keep=unlimited", "keep: the time until bookies delete"),
        ("s3://bucket,keep=", "keep: '' is not a duration"),
        ("s3://bucket,read-from=tape", "read-from: 'tape' is neither bookies nor objects"),
    ],
)
def test_a_bad_offload_policy_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(BadValueError, match=says) as refused:
        offload_body(text)
    assert "hush" not in str(refused.value)


def test_tiered_status_says_what_is_under_way_and_what_fails() -> None:
    quiet = {"topic": "t", "live": None, "waiting_deletions": 0}
    busy = {"topic": "u", "live": {"uploading": 7, "last_error": None, "deletion_error": None}, "waiting_deletions": 0}
    failing = {
        "topic": "v",
        "live": {"uploading": None, "last_error": "no bucket", "failing_since_ms": 1000, "deletion_error": "away"},
        "waiting_deletions": 2,
    }
    lines = problem_lines([quiet, busy, failing])
    assert lines[0] == "u: ledger 7 is being uploaded"
    assert lines[1].startswith("v: offloading fails since ")
    assert lines[1].endswith(": no bucket")
    assert lines[2] == "v: 2 objects of removed ledgers wait to be deleted: away"
