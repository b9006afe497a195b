"""`cepheid secure enable`: what each stage writes, and what keeps it from going on. With processes: tests/e2e."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cepheid_cli import secure, secure_enable
from cepheid_cli.secure_enable import StageNotPossibleError, not_in_force, run_enable, stage_of, write_stage
from cepheid_metadata.process_reports import SecurityFacts

OPEN = SecurityFacts(plain=True)
BESIDE = SecurityFacts(
    zookeeper_user=True, tls=True, plain=True, authentication=True, anonymous=True, authorization=True, enforced=False
)
PRIVATE = BESIDE.replace(zookeeper_private=True)
ENFORCED = PRIVATE.replace(anonymous=False, enforced=True)
CLOSED = ENFORCED.replace(plain=False)


@pytest.mark.parametrize(
    ("facts", "stages", "reason"),
    [
        (OPEN, 0, "b: it has no user in ZooKeeper"),
        (BESIDE, 1, r"b: what it creates in ZooKeeper is for everybody"),
        (PRIVATE, 2, "b: it serves clients without credentials"),
        (ENFORCED, 3, "b: it has a port without TLS"),
        (CLOSED, 4, None),
    ],
)
def test_a_stage_is_in_force_when_what_it_needs_is(facts: SecurityFacts, stages: int, reason: str | None) -> None:
    """Later stages include earlier ones: a broker that is ahead keeps nobody back."""
    found = {"brokers": {"b": facts.model_dump()}, "bookies": {}}
    reasons = [not_in_force(stage, found) for stage in range(5)]
    assert [not each for each in reasons] == [stage <= stages for stage in range(5)]
    if reason is not None:
        assert reasons[stages + 1][0].startswith(reason)


def test_a_process_that_reports_nothing_keeps_all_back() -> None:
    (reason,) = not_in_force(0, {"brokers": {}, "bookies": {"bookie-1": None}})
    assert "bookie-1 has not said how it is secured: it runs an older release" in reason


def test_stages_write_what_they_say_and_end_where_init_began(tmp_path: Path) -> None:
    secure.init(tmp_path)
    files = ("broker.toml", "bookie.toml", "autorecovery.toml")
    before = {name: (tmp_path / name).read_bytes() for name in files}
    settings: dict[str, Any] = {}
    for stage in (1, 2, 3):
        write_stage(tmp_path, stage)
        assert stage_of(tmp_path) == stage
        settings[str(stage)] = {name: tomllib.loads((tmp_path / name).read_text()) for name in files}
    broker = [settings[stage]["broker.toml"] for stage in "123"]
    assert [each["tls"]["plain_ports"] for each in broker] == [True, True, True]
    assert [each["authentication"].get("anonymous_role") for each in broker] == ["anonymous", "anonymous", None]
    assert [each["authorization"].get("enforced") for each in broker] == [False, False, None]
    assert [settings[stage][name].get("metadata_private") for stage in "12" for name in files] == [False] * 3 + [None] * 3
    assert [settings[stage]["bookie.toml"]["tls"]["port"] for stage in "123"] == [0, 0, 0]
    write_stage(tmp_path, 4)
    assert {name: (tmp_path / name).read_bytes() for name in files} == before
    write_stage(tmp_path, 1)  # the way back
    write_stage(tmp_path, 0)
    assert stage_of(tmp_path) == 0
    assert {name: (tmp_path / name).read_bytes() for name in files} == before


def test_what_keeps_a_stage_from_being_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, Any] = {"brokers": {"b": OPEN.model_dump()}, "bookies": {}, "problems": []}

    class Admin:
        def __init__(self, _url: str) -> None:
            pass

        def call(self, _method: str, _path: str) -> Any:
            return answers

    monkeypatch.setattr(secure_enable, "connect_admin", Admin)
    secure.init(tmp_path)
    with pytest.raises(StageNotPossibleError, match="is in stage 0: stage 1 comes first"):
        run_enable(tmp_path, 2, None, "")
    with pytest.raises(StageNotPossibleError, match="stages are 0 to 4, got 7"):
        run_enable(tmp_path, 7, None, "")
    run_enable(tmp_path, None, None, "")
    with pytest.raises(StageNotPossibleError, match="stage 1 is not in force everywhere:\n  b: it has no user in ZooKeeper"):
        run_enable(tmp_path, None, None, "")
    answers["brokers"]["b"] = PRIVATE.model_dump()
    run_enable(tmp_path, None, None, "")
    with pytest.raises(StageNotPossibleError, match="stage 3 closes ZooKeeper: name it as --metadata"):
        run_enable(tmp_path, None, None, "")
    assert stage_of(tmp_path) == 2


def test_a_directory_of_an_earlier_release_is_updated_first(tmp_path: Path) -> None:
    secure.init(tmp_path)
    path = tmp_path / "broker.toml"
    path.write_text(path.read_text().partition("[authorization]")[0])
    with pytest.raises(StageNotPossibleError, match=r"broker.toml in .* lack settings .* --update` first"):
        run_enable(tmp_path, None, None, "")


def test_the_status_shows_what_each_process_says(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    answer = {
        "brokers": {
            "b": {**PRIVATE.model_dump(), "zookeeper_tls": True, "revocation_lists": False},
            "older": PRIVATE.model_dump(),
            "silent": None,
        },
        "bookies": {},
        "problems": ["something"],
    }
    monkeypatch.setattr(secure_enable, "connect_admin", lambda _url: SimpleNamespace(call=lambda *_: answer))
    secure_enable.run_status("")
    head, *rows = (re.split("  +", line.strip()) for line in capsys.readouterr().out.splitlines())
    assert head[-3:] == ["ZK PRIVATE", "ZK TLS", "CRL"]
    assert [row[-3:] for row in rows] == [["yes", "yes", "no"], ["yes", "?", "?"], ["?", "?", "?"], ["problem: something"]]
