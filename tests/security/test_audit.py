"""The audit log: what a line says, what happens when lines cannot be written, and how files rotate."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cepheid_ports import ThreadWorker
from cepheid_security import Principal
from cepheid_security.audit import REFUSALS_PER_WINDOW, WINDOW_MS, AuditFile, AuditLog

ANN = Principal("ann", "token")
NOON_MS = 1_767_268_800_123


class Written:
    """What the audit log wrote; `fail` makes the next write raise."""

    def __init__(self) -> None:
        self.data = b""
        self.fail = False

    def __call__(self, lines: bytes) -> None:
        if self.fail:
            self.fail = False
            raise OSError(28, "No space left on device")
        self.data += lines

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.data.splitlines()]


def audit_log(written: Callable[[bytes], None], **settings: Any) -> AuditLog:
    return AuditLog(written, ThreadWorker("audit"), lambda: NOON_MS, **settings)


async def test_a_line_says_who_did_what_from_where_and_how_it_ended() -> None:
    written = Written()
    audit = audit_log(written)
    audit.record(ANN, "10.0.0.1:5000", "PUT /admin/v2/tenants/{tenant}", "/admin/v2/tenants/t", "done", original_role="bob")
    audit.record(None, "10.0.0.1:5001", "CONNECT", "", "denied", "the token expired\nat noon")
    await audit.aclose()
    assert written.lines == [
        {
            "time": "2026-01-01T12:00:00.123Z",
            "role": "ann",
            "original_role": "bob",
            "method": "token",
            "peer": "10.0.0.1:5000",
            "operation": "PUT /admin/v2/tenants/{tenant}",
            "object": "/admin/v2/tenants/t",
            "result": "done",
        },
        {
            "time": "2026-01-01T12:00:00.123Z",
            "peer": "10.0.0.1:5001",
            "operation": "CONNECT",
            "result": "denied",
            "reason": "the token expired\nat noon",
        },
    ]
    assert audit.figures().written == 2


async def test_lines_that_could_not_be_written_are_counted_and_reported() -> None:
    written = Written()
    audit = audit_log(written, max_waiting_lines=2)
    for number in range(3):  # the third finds no room
        audit.record(ANN, "x", f"one {number}", "", "done")
    await audit.aclose()
    assert audit.figures().lost == 1

    written = Written()
    written.fail = True
    audit = audit_log(written)
    audit.record(ANN, "x", "lost", "", "done")
    audit._flush()
    await audit._worker.run(lambda: None)  # type: ignore[union-attr]
    audit.record(ANN, "x", "kept", "", "done")
    await audit.aclose()
    assert [(line["operation"], line.get("reason")) for line in written.lines] == [
        ("audit.lines_lost", "1 lines before this one were lost"),
        ("kept", None),
    ]
    assert audit.figures().lost == 1
    assert audit.figures().waiting == 0


async def test_a_flood_of_denials_from_one_address_is_summed_up() -> None:
    now_ms = [NOON_MS]
    written = Written()
    audit = AuditLog(written, ThreadWorker("audit"), lambda: now_ms[0])
    for port in range(REFUSALS_PER_WINDOW + 5):
        audit.record(None, f"10.0.0.1:{1000 + port}", "CONNECT", "", "denied")
    audit.record(None, "10.0.0.2:1", "CONNECT", "", "denied")
    audit.record(ANN, "10.0.0.1:1", "change", "", "denied")  # a role has lines of its own
    now_ms[0] += WINDOW_MS
    audit.record(None, "10.0.0.1:9", "CONNECT", "", "denied")
    await audit.aclose()
    assert len(written.lines) == REFUSALS_PER_WINDOW + 4
    assert [line["reason"] for line in written.lines if line["operation"] == "audit.suppressed"] == ["5 more denials and failures"]
    assert audit.figures().suppressed == 5


async def test_what_was_suppressed_is_summed_up_without_another_denial_and_when_an_address_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("cepheid_security.audit.WINDOW_MS", 20)
    monkeypatch.setattr("cepheid_security.audit._MAX_ADDRESSES", 2)
    now_ms = [NOON_MS]
    written = Written()
    audit = AuditLog(written, ThreadWorker("audit"), lambda: now_ms[0])
    for number in range(REFUSALS_PER_WINDOW + 1):
        audit.record(None, f"[2001:db8::{number:x}]:1", "CONNECT", "", "denied")
    audit.record(None, "10.0.0.1:1", "CONNECT", "", "denied")
    audit.record(None, "10.0.0.2:1", "CONNECT", "", "denied")  # the network is forgotten
    for _ in range(REFUSALS_PER_WINDOW):
        audit.record(None, "10.0.0.2:1", "CONNECT", "", "denied")
    now_ms[0] += 20
    async with asyncio.timeout(5):
        while sum(line["operation"] == "audit.suppressed" for line in written.lines) < 2:  # noqa: ASYNC110 - by a timer
            await asyncio.sleep(0.005)
    summed_up = [(line["peer"], line["reason"]) for line in written.lines if line["operation"] == "audit.suppressed"]
    assert summed_up == [("2001:db8::/64", "1 more denials and failures"), ("10.0.0.2", "1 more denials and failures")]
    await audit.aclose()


async def test_an_output_that_is_blocked_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cepheid_security.audit._CLOSE_TIMEOUT_S", 0.05)
    goes_on = threading.Event()
    audit = audit_log(lambda _: goes_on.wait(10) and None)
    audit.record(ANN, "x", "y", "", "done")
    async with asyncio.timeout(5):
        await audit.aclose()
    goes_on.set()


def test_a_line_that_was_written_in_part_is_not_joined_to_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.log"
    file = AuditFile(path, max_bytes=1000, max_files=2)
    file.write(b"{}\n")
    write, calls = os.write, []

    def full(fd: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return write(fd, bytes(data)[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        file.write(b'{"a": 1}\n')
    monkeypatch.undo()
    file.write(b"{}\n")
    file.close()
    assert path.read_bytes() == b'{}\n{"a\n{}\n'


async def test_without_a_place_to_write_nothing_is_recorded() -> None:
    audit = AuditLog()
    audit.record(ANN, "x", "y", "", "done")
    await audit.aclose()
    assert not audit.enabled
    assert audit.figures().lost == 0


def test_a_full_file_is_renamed_and_so_many_are_kept(tmp_path: Path) -> None:
    file = AuditFile(tmp_path / "audit" / "audit.log", max_bytes=10, max_files=3)
    for letter in b"abcde":
        file.write(bytes([letter]) * 8 + b"\n")
    file.close()
    assert {path.name: path.read_bytes()[:1] for path in (tmp_path / "audit").iterdir()} == {
        "audit.log": b"e",
        "audit.log.1": b"d",
        "audit.log.2": b"c",
    }


@pytest.mark.parametrize("elsewhere", ["renamed", "deleted"])
def test_a_file_that_another_program_moved_is_created_again(tmp_path: Path, elsewhere: str) -> None:
    path = tmp_path / "audit.log"
    file = AuditFile(path, max_bytes=1000, max_files=2)
    file.write(b"one\n")
    if elsewhere == "renamed":
        path.rename(tmp_path / "moved")
    else:
        path.unlink()
    file.write(b"two\n")
    file.close()
    assert path.read_bytes() == b"two\n"
    assert path.stat().st_mode & 0o777 & ~0o640 == 0


def test_a_line_that_a_crash_cut_off_is_not_joined_to_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b'{"role": "an')
    file = AuditFile(path, max_bytes=1000, max_files=2)
    file.write(b"{}\n")
    file.close()
    assert path.read_bytes() == b'{"role": "an\n{}\n'
