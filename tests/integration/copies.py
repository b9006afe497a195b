"""What lies at the bookies when a chaos test ends, asked as an operator asks: `cepheid ledgers verify`."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner

from cepheid_cli.app import app

FORBIDDEN = ("corrupt", "divergent")


def bad_copies(metadata_url: str, topic: str) -> list[str]:
    """Entries without a valid copy, and copies that no failure of a process excuses. Missing and unreadable ones are no news:
    a bookie that was replaced has not got everything, and one that is dead says nothing."""
    bad = []
    for item in _ask("list", "--topic", topic, metadata_url=metadata_url):
        ledger_id = item["ledger"]["ledger_id"]
        (report,) = _ask("verify", str(ledger_id), metadata_url=metadata_url)
        if unseen := report["lost_entries"] + report["unknown_entries"]:
            bad.append(f"ledger {ledger_id}: {unseen} entries without a valid copy: {report['findings']}")
        bad += [f"ledger {ledger_id}: {finding}" for finding in report["findings"] if finding["ailment"] in FORBIDDEN]
    return bad


def _ask(*words: str, metadata_url: str) -> Any:
    done = CliRunner().invoke(app, ["ledgers", *words, "--metadata", metadata_url, "--json"])
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    assert done.exit_code in (0, 1, 3), (words, done.output)
    return json.loads(done.stdout)
