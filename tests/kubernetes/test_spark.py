"""`spark.enabled`: `helm test` counts the messages with Spark, in an image of its own."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.kubernetes.places import SPARK_IMAGE, RunningNode
from tests.kubernetes.release import Release

SPARK = ("--set=spark.enabled=true", f"--set=spark.image={SPARK_IMAGE}")


@pytest.fixture(params=[False, True], ids=["open", "secure"])
def with_spark(node: RunningNode, request: pytest.FixtureRequest) -> Iterator[Release]:
    name = f"spark-{'secure' if request.param else 'open'}"
    release = Release(node, name, "--set=profile=small", *SPARK, secure=request.param)
    release.delete_namespace()
    release.create_namespace()
    yield release
    release.save_report()
    release.delete_namespace()


def test_helm_test_counts_the_messages_with_spark(with_spark: Release, figures: dict[str, object]) -> None:
    with_spark.install()
    began = time.monotonic()
    said = with_spark.helm("test", with_spark.name, "--timeout=600s", "--logs")
    found = re.search(r"read with Spark: ([0-9.]+) s", said)
    assert found is not None, said
    figures[f"{with_spark.name}: helm test, s"] = round(time.monotonic() - began, 1)
    figures[f"{with_spark.name}: query, s"] = float(found[1])
