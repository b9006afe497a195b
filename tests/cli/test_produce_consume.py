"""`cepheid consume` shows messages, however clients packed them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pulsar
import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid import UnreadableMessageError
from cepheid_cli.app import app
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of

CODECS = {"lz4": pulsar.CompressionType.LZ4, "zlib": pulsar.CompressionType.ZLib, "snappy": pulsar.CompressionType.SNAPPY}


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster, client_of(cluster.service_url) as client:
        for name, codec in CODECS.items():
            for batching in (True, False):
                producer = client.create_producer(
                    f"{name}-{batching}", compression_type=codec, batching_enabled=batching, batching_max_publish_delay_ms=500
                )
                for number in range(3):
                    producer.send_async(b"order %d " % number * 20, lambda *_: None, partition_key=f"k{number}")
                producer.flush()
        yield cluster


def consume(server: ProcessCluster, topic: str, count: int = 3) -> Result:
    words = ["consume", topic, "--earliest", "--count", str(count), "--url", server.service_url]
    result = CliRunner().invoke(app, words)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.parametrize("batching", [True, False], ids=["batched", "single"])
@pytest.mark.parametrize("codec", CODECS)
def test_compressed_messages_are_shown_as_they_were_sent(server: ProcessCluster, codec: str, batching: bool) -> None:
    shown = [line.split("  ", 2) for line in consume(server, f"{codec}-{batching}").output.splitlines()]
    assert [(key, text.strip()) for _, key, text in shown] == [(f"k{n}", (f"order {n} " * 20).strip()) for n in range(3)]
    assert [place.count(":") for place, _, _ in shown] == [2 if batching else 1] * 3


def test_a_codec_without_its_library_is_named_with_what_to_install(server: ProcessCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(server.service_url) as client:
        producer = client.create_producer("bare", compression_type=pulsar.CompressionType.LZ4, batching_enabled=False)
        producer.send(b"a message")
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "cramjam", None)
        with pytest.raises(UnreadableMessageError, match=r"LZ4 needs the library cramjam: pip install .cepheid.compression."):
            consume(server, "bare", 1)
    assert "a message" in consume(server, "bare", 1).output, "it was not acknowledged"
