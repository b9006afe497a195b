"""A cluster that repairs within seconds, and what its tests wait for."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.testing import CliRunner

from cepheid_cli.app import app
from tests.integration.chaos_cluster import BALANCE, ChaosCluster, own_cluster

GRACE_S = 3.0
SETTINGS: dict[str, dict[str, Any]] = {
    "broker": {"managed_ledger": {"ledger_max_entries": 500, "ledger_min_age_s": 1.0}, "balance": BALANCE},  # many closed ledgers
    "bookie": {
        "recovery": {
            "grace_s": GRACE_S,
            "open_ledger_grace_s": 15.0,
            "poll_s": 0.5,
            "retry_s": 1.0,
            "walk_interval_s": 2.0,
        },
    },
}


@contextmanager
def repairing_cluster(
    *, bookies: int, brokers: int = 2, storage: dict[str, Any] | None = None, **recovery: Any
) -> Iterator[RepairingCluster]:
    """Run a cluster for one test. `recovery`: settings of automatic repair in bookies; `storage`: of their disks."""
    bookie = {"recovery": {**SETTINGS["bookie"]["recovery"], **recovery}, "storage": storage or {}}
    with own_cluster(bookies=bookies, brokers=brokers, settings={**SETTINGS, "bookie": bookie}) as cluster:
        yield RepairingCluster(cluster)


class RepairingCluster:
    """Blocking calls about automatic repair of a cluster of processes."""

    def __init__(self, chaos: ChaosCluster) -> None:
        self.chaos = chaos
        self.processes = chaos.processes
        self.view = chaos.view

    def command(self, *words: str) -> str:
        """Run a command of `cepheid` that talks to the first broker. Return its output; fail unless it succeeds."""
        code, output = self.outcome(*words)
        assert code == 0, f"cepheid {' '.join(words)} ended with {code}: {output}\n{self.chaos.last_words()}"
        return output

    def outcome(self, *words: str) -> tuple[int, str]:
        """Return the exit code and the output of a command of `cepheid` that talks to the first broker."""
        done = CliRunner().invoke(app, [*words, "--admin-url", self.processes.admin_urls[0]])
        assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
        return done.exit_code, done.output

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.command("repair", "status", "--json")))

    def counters(self, *names: str) -> dict[str, dict[str, float]]:
        """Return metrics of each bookie process that runs, by bookie and name."""
        found: dict[str, dict[str, float]] = {}
        for process in self.processes.status():
            if process.kind == "bookie" and process.state == "ready":
                with urllib.request.urlopen(f"http://127.0.0.1:{process.ports['http']}/metrics", timeout=10) as answer:
                    lines = [line.partition(" ") for line in answer.read().decode().splitlines()]
                found[process.name] = {name: float(value) for name, _, value in lines if name in names}
        return found

    def wait_until_unnamed(self, bookie: str) -> None:
        """Wait until every ledger has all its copies on bookies other than this one."""

        def is_whole() -> bool:
            return bookie not in self.view.bookies_with_entries() and not self.view.marked_ledgers()

        self.chaos.wait_until(is_whole, f"no ledger names {bookie}, and none is marked")

    def wait_until_refilled(self, bookie: str) -> None:
        """Wait until a bookie that lost its disk has all its copies again."""

        def is_whole() -> bool:
            audit = self.view.audit()
            return audit is not None and bookie in audit.refilled and not self.view.marked_ledgers()

        self.chaos.wait_until(is_whole, f"{bookie} has its copies again, and no ledger is marked")

    def wait_for_walk(self) -> None:
        """Wait until the auditor has looked at every ledger once more, from now on."""
        began_ms = time.time() * 1000

        def has_walked() -> bool:
            audit = self.view.audit()
            return audit is not None and audit.finished_at_ms > began_ms

        self.chaos.wait_until(has_walked, "the auditor has walked over all ledgers")

    def decommission(self, bookie: str) -> None:
        """Move everything off a bookie, stop it, and wait until metadata has forgotten it."""
        said = self.command("bookies", "decommission", bookie, "--wait")
        assert "stop it, and discard its disks" in said, said
        self.processes.stop(bookie)
        self.chaos.wait_until(lambda: bookie not in self.known_bookies(), f"{bookie} is forgotten")

    def known_bookies(self) -> list[str]:
        return [one["bookie_id"] for one in json.loads(self.command("bookies", "list", "--json"))]

    def has_every_copy(self) -> bool:
        """Return whether every copy of every entry is there and valid."""
        return self.outcome("ledgers", "verify", "--all")[0] == 0
