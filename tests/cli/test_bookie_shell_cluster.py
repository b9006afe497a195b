"""A server with three bookies, one of which lost its index in a crash, and got another by `cepheid bookie-shell rebuild-index`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_testkit import ProcessCluster
from tests.wire_client import WireClient

TOPIC = "persistent://public/default/orders"


def cepheid(*words: str) -> str:
    result = CliRunner().invoke(app, list(words))
    assert result.exception is None, (result.exception, result.output)
    return result.stdout


@pytest.mark.slow
def test_a_bookie_with_a_rebuilt_index_takes_part_again_and_every_copy_is_valid(tmp_path: Path) -> None:
    cluster = ProcessCluster(tmp_path / "data", bookies=3)
    admin = ("--admin-url", cluster.admin_url)
    cluster.start()
    try:
        with WireClient(cluster.service_url, TOPIC) as client:
            client.open_producer()
            cepheid("subscriptions", "create", TOPIC, "keeps-it", *admin)
            for number in range(50):
                client.send(number, b"x" * 1000, key="k")
        cluster.kill()
        directory = str(tmp_path / "data" / "bookie-2")
        shutil.rmtree(Path(directory) / "index")
        metadata = ("--metadata", f"rocksdb:{tmp_path / 'data' / 'metadata'}")
        cepheid("bookie-shell", "rebuild-index", "--data", directory, "--yes", *metadata)
        cluster.start()
        with WireClient(cluster.service_url, TOPIC) as client:
            client.open_producer()
            client.send(50, b"after", key="k")
        (old, *_) = json.loads(cepheid("ledgers", "list", "--topic", TOPIC, "--json", *admin))
        assert (old["ledger"]["state"], old["ledger"]["last_entry_id"]) == ("CLOSED", 49)
        said = cepheid("ledgers", "verify", str(old["ledger"]["ledger_id"]), "--repair", *admin)
        assert "150 copies: 150 valid, 0 bad or missing, 0 not known" in said
        assert "ledgers below 1001" in cepheid("bookies", "list", *admin)
        assert "Traceback" not in cluster.log_text, cluster.log_text[-4000:]
    finally:
        cluster.stop()
