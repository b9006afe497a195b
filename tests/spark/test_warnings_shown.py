"""What a user is to know of rows that are not there is in the text of warnings: where no logging is set up, no more is shown."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable

import pulsar
import pytest
from pyspark.sql import DataFrame, SparkSession

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import publish

pytestmark = pytest.mark.slow

Load = Callable[..., DataFrame]
SETTING = "spark.sql.pyspark.worker.logging.enabled"
READ_BY_ITSELF = """
import sys
from cepheid_scan import scan
print(scan(sys.argv[1], service_url=sys.argv[2], start={sys.argv[1]: "0:0"}, fail_on_data_loss=False).read_all().num_rows)
"""


def test_without_any_logging_a_loss_that_is_accepted_is_told_with_topic_and_range(
    server: ProcessCluster, client: pulsar.Client, topic: str
) -> None:
    publish(client, topic, [b"x"] * 3)
    command = [sys.executable, "-c", READ_BY_ITSELF, topic, server.service_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "3\n"
    assert f"scan.data_lost: persistent://public/default/{topic}: the range from 0:0 to before " in done.stderr


def test_spark_shows_what_its_workers_warned_of(
    spark: SparkSession, server: ProcessCluster, client: pulsar.Client, topic: str, load: Load
) -> None:
    """With the setting of Spark's that docs/spark.md names."""
    publish(client, topic, [b'{"number": 1}', b"no json", b'{"number": 3}'])
    definition = {"type": "record", "name": "F", "fields": [{"name": "number", "type": "int"}]}
    url = f"{server.admin_url}/admin/v2/schemas/public/default/{topic}/schema"
    body = json.dumps({"type": "JSON", "schema": json.dumps(definition), "properties": {}}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=30).close()
    spark.conf.set(SETTING, "true")
    try:
        assert load(topic, readMode="typed", onBadRecord="skip").count() == 2
        lost = json.dumps({topic: "0:0"})
        assert load(topic, startingOffsets=lost, failOnDataLoss="false").count() == 3
        shown = [row.msg for row in spark.tvf.python_worker_logs().where("level = 'WARNING'").collect()]
    finally:
        spark.conf.unset(SETTING)
    name = f"persistent://public/default/{topic}"
    assert [text for text in shown if text.startswith(f"scan.incomplete: of {name} ") and "(onBadRecord=skip)" in text], shown
    assert [text for text in shown if text.startswith(f"scan.data_lost: {name}: ")], shown
