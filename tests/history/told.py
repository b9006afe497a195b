"""A workload in a process of its own, which is told over a pipe what happens to the server.

    test ── "fault SIGKILL bookie-2" ──►  python -m tests.history --told … --save history.jsonl
         ◄── {"sent": 812, "failed": 0, …} ──                                                      one answer to each line
         ── "stop" ──► it stops publishing, drains, audits, saves, and ends

Lines: `restart` and `restarted` (clients lose their connections: they may send again, and be sent again), `fault WHAT` (a part
broke, which excuses nothing), `progress`, `stop`. The end of the input is a stop.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tests.history.events import Event, load
from tests.history.recorder import Recorder

POLL_S = 0.05
END_LIMIT_S = 150.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What the workload has seen so far."""

    send: int
    sent: int
    failed: int
    received: int
    failures: tuple[str, ...] = ()


def take_standard_output() -> TextIO:
    """For the answers alone: what the client's library prints goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def conduct_as_told(lines: TextIO, answers: TextIO) -> Callable[[Recorder, Sequence[BaseException]], None]:
    """A conductor for the workload: in its process."""

    def conduct(recorder: Recorder, failures: Sequence[BaseException]) -> None:
        for line in lines:
            word, _, rest = line.strip().partition(" ")
            if word == "stop":
                return
            if word == "fault":
                recorder.note("fault", details={"what": rest})
            elif word in ("restart", "restarted"):
                recorder.note(word)
            elif word != "progress":
                raise ValueError(f"told {line!r}: it is restart, restarted, fault WHAT, progress or stop")
            counts = {kind: recorder.counts[kind] for kind in ("send", "sent", "failed", "received")}
            print(json.dumps({**counts, "failures": [repr(failure) for failure in failures]}), file=answers, flush=True)

    return conduct


class ToldWorkload:
    """`with ToldWorkload("--url", …) as workload:` starts it; `end()` gives its history. Whoever leaves early kills it."""

    def __init__(self, *arguments: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="history-")
        self._path = Path(self._directory.name) / "history.jsonl"
        self._said = Path(self._directory.name) / "stderr"
        self._command = [
            sys.executable,
            "-X",
            "faulthandler",
            "-m",
            "tests.history",
            "--told",
            "--save",
            str(self._path),
            *arguments,
        ]
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True, bufsize=1
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._directory.cleanup()

    def tell(self, line: str) -> Progress:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(line, file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise AssertionError(f"the workload ended early: {self.last_words}")
        fields: dict[str, Any] = json.loads(answer)
        return Progress(**{**fields, "failures": tuple(fields["failures"])})

    def wait_for_receipts(self, more: int, within_s: float) -> Progress:
        """So many further messages are acknowledged from now on."""
        first = progress = self.tell("progress")
        deadline = time.monotonic() + within_s
        while progress.sent < first.sent + more:
            assert not progress.failures, progress.failures
            assert time.monotonic() < deadline, f"{progress.sent - first.sent} of {more} receipts within {within_s} s: {progress}"
            time.sleep(POLL_S)
            progress = self.tell("progress")
        return progress

    def end(self) -> list[Event]:
        """Stops publishing, lets it drain and audit, and returns what it saw."""
        try:
            self._process.communicate("stop\n", timeout=END_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the workload did not end within {END_LIMIT_S} s: {self.last_words}") from None
        if not self._path.exists():
            raise AssertionError(f"the workload failed, with exit code {self._process.returncode}: {self.last_words}")
        return load(self._path)

    @property
    def last_words(self) -> str:
        return self._said.read_text(errors="replace")[-3000:]
