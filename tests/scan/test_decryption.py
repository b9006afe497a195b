"""Messages that the official client encrypts, read by `scan()`, `cepheid read` and `cepheid lake export` with keys and without."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pulsar
import pyarrow.dataset as ds
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from pulsar.schema import AvroSchema
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_ports import CepheidError
from cepheid_scan import BadOptionError, BadRecordError, scan
from cepheid_testkit import ProcessCluster
from tests.e2e.official_client import client_of

COUNT = 200
NUMBERED = {"type": "record", "name": "Numbered", "fields": [{"name": "n", "type": "int"}]}
VALUES = [b"secret %d" % number for number in range(COUNT)]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the private key of the producers, which name it `app`."""
    key, folder = rsa.generate_private_key(65537, 2048), tmp_path_factory.mktemp("keys")
    (folder / "app.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder.parent / f"{folder.name}.public").write_bytes(public)
    return folder


@pytest.fixture(scope="module")
def server(keys: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster() as cluster, client_of(cluster.service_url) as client:
        reader = pulsar.CryptoKeyReader(str(keys.parent / f"{keys.name}.public"), str(keys / "app.pem"))
        encrypted: dict[str, Any] = {"encryption_key": "app", "crypto_key_reader": reader}
        for topic, options in (
            ("batches", {"batching_enabled": True, "compression_type": pulsar.CompressionType.LZ4}),
            ("alone", {"batching_enabled": False}),
        ):
            producer = client.create_producer(topic, **options, **encrypted)
            for value in VALUES:
                producer.send_async(value, lambda *_: None, partition_key="k")
            producer.flush()
        typed = client.create_producer("typed", schema=AvroSchema(None, NUMBERED), **encrypted)
        for number in range(3):
            typed.send({"n": number})
        large = client.create_producer("large", batching_enabled=False, chunking_enabled=True, **encrypted)
        large.send(bytes(range(256)) * (6 << 12))
        yield cluster


def read(server: ProcessCluster, topic: str, **options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = scan(topic, service_url=server.service_url, **options).read_all().to_pylist()
    return rows


@pytest.mark.parametrize("topic", ["batches", "alone"])
def test_a_directory_of_keys_decrypts_what_the_official_client_encrypts(server: ProcessCluster, keys: Path, topic: str) -> None:
    rows = read(server, topic, decryption_keys=str(keys))
    assert [row["value"] for row in rows] == VALUES
    assert {row["key"] for row in rows} == {"k"}
    assert {len(row["properties"]) for row in rows} == {0}


def test_chunks_of_the_official_client(server: ProcessCluster, keys: Path) -> None:
    (row,) = read(server, "large", decryption_keys=str(keys))
    assert row["value"] == bytes(range(256)) * (6 << 12)


def test_a_function_decrypts_typed_rows(server: ProcessCluster, keys: Path) -> None:
    def private_key(name: str, metadata: Mapping[str, str]) -> bytes:
        return (keys / f"{name}.pem").read_bytes()

    rows = read(server, "typed", decryption_keys=private_key, mode="typed", columns=["n"])
    assert rows == [{"n": number} for number in range(3)]


def test_a_function_may_be_named(server: ProcessCluster, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_keys.py").write_text(
        f"def pem(name, metadata):\n    with open('{keys}/' + name + '.pem', 'rb') as file:\n        return file.read()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [row["value"] for row in read(server, "alone", decryption_keys="my_keys:pem")] == VALUES
    sys.modules.pop("my_keys")


def test_without_keys_a_message_is_bad_or_shown_as_it_is_stored(server: ProcessCluster) -> None:
    with pytest.raises(BadRecordError, match="its payload is encrypted, and no decryption keys are given"):
        read(server, "alone")
    rows = read(server, "alone", on_bad_record="null")
    assert len(rows) == COUNT
    assert not {row["value"] for row in rows} & set(VALUES)
    assert "encryption.key.app" in dict(rows[0]["properties"])


def test_a_key_that_is_missing_is_named(server: ProcessCluster, tmp_path: Path) -> None:
    with pytest.raises(BadRecordError, match=r"cannot be decrypted: key 'app': .* has neither app\.pem nor app"):
        read(server, "alone", decryption_keys=str(tmp_path))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("/no/such/directory", "is neither a directory on this host nor of the form"),
        ("no_such_module:pem", "no_such_module:pem cannot be imported"),
        ("json:__name__", "json:__name__ is not a function"),
        ("", "decryption keys are a function"),
        (5, "decryption keys are a function"),
    ],
)
def test_keys_that_cannot_be_are_refused(server: ProcessCluster, given: Any, said: str) -> None:
    with pytest.raises(BadOptionError) as caught:
        read(server, "alone", decryption_keys=given)
    assert said in str(caught.value)


def test_a_producer_cannot_choose_a_file_outside_of_the_directory(keys: Path) -> None:
    from cepheid_scan.decryption_keys import KeyDirectory

    with pytest.raises(BadOptionError, match="cannot be the name of a file"):
        KeyDirectory(keys).private_key(f"../{keys.name}/app", {})


def test_read_and_export_take_keys(server: ProcessCluster, keys: Path, tmp_path: Path) -> None:
    url = ["--url", server.service_url]
    result = CliRunner().invoke(app, ["read", "alone", "--decryption-keys", str(keys), "--limit", "1", "--columns", "value", *url])
    assert json.loads(result.stdout) == {"value": "secret 0"}
    refused = CliRunner().invoke(app, ["read", "alone", *url])
    assert isinstance(refused.exception, CepheidError)
    assert "no --decryption-keys are given" in str(refused.exception)
    words = ["lake", "export", "batches", "--to", f"parquet://{tmp_path}/table", "--decryption-keys", str(keys), *url]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert sorted(ds.dataset(tmp_path / "table", format="parquet").to_table()["value"].to_pylist()) == sorted(VALUES)
