"""What `pip wheel` makes of a clone, installed where there is no pandas and nothing of the clone: it reads a topic."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of
from tests.installed_wheel import run

pytestmark = pytest.mark.slow

SCAN = """
import importlib.util, sys
from cepheid_scan import scan
assert importlib.util.find_spec("pandas") is None
table = scan("orders", service_url=sys.argv[1], columns=["key", "value", "publish_time"]).read_all()
import cepheid_scan, cepheid_spark.source, pyspark_cepheid
assert cepheid_scan.__file__.startswith(sys.prefix), cepheid_scan.__file__
print(table["value"].to_pylist())
"""


@pytest.mark.slow
def test_it_reads_a_topic(wheel_bin: Path) -> None:
    with ProcessCluster() as server:
        with client_of(server.service_url) as client:
            producer = client.create_producer("orders")
            for number in range(3):
                producer.send(b"%d" % number)
        assert run(wheel_bin / "python", "-c", SCAN, server.service_url).strip() == "[b'0', b'1', b'2']"
        read = run(wheel_bin / "cepheid", "read", "orders", "--columns", "value", "--url", server.service_url)
    assert read.splitlines() == [f'{{"value": "{number}"}}' for number in range(3)]
