"""Opening a store by URL: what is wrong with a bad one is said, and secrets are never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from cepheid_metadata import MemoryStore, MemoryTree, StoreInUseError, Versioned, patient_open
from cepheid_metadata.open_store import AUTH_VARIABLE, StoreUrlError, open_store, parse_zookeeper
from cepheid_metadata.store import StoreSecurity
from cepheid_ports import Ports
from cepheid_security import ClientTls
from tests.support import run_async
from tests.zookeeper_support import new_zookeeper_url


@pytest.mark.parametrize(
    ("rest", "addresses", "root"),
    [
        ("//localhost", ["localhost:2181"], ""),
        ("//a:1,b.example:65535,10.0.0.1:3/", ["a:1", "b.example:65535", "10.0.0.1:3"], ""),
        ("//[::1]:2181,[fe80::1]/cepheid/prod/", ["[::1]:2181", "[fe80::1]:2181"], "/cepheid/prod"),
    ],
)
def test_zookeeper_addresses(rest: str, addresses: list[str], root: str) -> None:
    assert parse_zookeeper(rest) == (addresses, root)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "unknown kind of metadata store ''"),
        ("localhost:2181", "unknown kind of metadata store 'localhost'"),
        ("http://a:1", "unknown kind of metadata store 'http'"),
        ("zk:a:1", "begins with zk://"),
        ("zk://", "names at least one host"),
        ("zk:///root", "names at least one host"),
        ("zk://a:1,,b:2", "no empty ones"),
        ("zk://a:0", "'a:0': a port is between 1 and 65535"),
        ("zk://a:70000", "a port is between"),
        ("zk://a:port", "'a:port' is not host:port"),
        ("zk://::1", "'::1' is not host:port"),
        ("zk://a b:1", "'a b:1' is not host:port"),
        ("zk://user:s3cret@a:1", "no user, password or parameters"),
        ("zk://a:1/r?auth=digest:u:s3cret", "no user, password or parameters"),
        ("zk://a:1/r//x", "the root of a ZooKeeper URL is not a key"),
        ("zk://a:1/../x", "the root of a ZooKeeper URL is not a key"),
        ("rocksdb:", "names a directory"),
        ("rocksdb:///", "names a directory"),
        ("rocksdb://data/metadata", "not on 'data'"),
    ],
)
def test_what_is_wrong_with_a_url_is_said(url: str, problem: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        run_async(open_store(url, Ports()))
    assert problem in str(caught.value)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("auth", ["s3cret", "plain:u:s3cret", "digest:s3cret", "digest:u:", "digest::s3cret"])
def test_bad_credentials_are_refused_without_repeating_them(auth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_VARIABLE, auth)
    with pytest.raises(StoreUrlError, match="must be digest:user:password") as caught:
        run_async(open_store("zk://127.0.0.1:1", Ports()))
    assert "s3cret" not in str(caught.value)


async def test_a_rocksdb_store_by_url(tmp_path: Path) -> None:
    url = f"rocksdb://{tmp_path}/metadata"
    store = await open_store(url, Ports())
    try:
        await store.create("/a", b"x")
        with pytest.raises(StoreInUseError):
            await open_store(url, Ports())
    finally:
        await store.aclose()
    assert (tmp_path / "metadata").is_dir()


async def test_a_zookeeper_store_by_url_with_credentials_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AUTH_VARIABLE, "digest:cepheid:pass:with:colons")
    url = new_zookeeper_url() + "/deep"
    store = await open_store(url, Ports(), session_timeout_s=4)
    try:
        await store.create("/a", b"x")
    finally:
        await store.aclose()
    again = await open_store(url, Ports(), auth="digest:cepheid:pass:with:colons")
    try:
        assert await again.get("/a") == Versioned(b"x", 0)
    finally:
        await again.aclose()


@pytest.mark.parametrize(
    ("auth", "tls", "encrypted", "warned"),
    [
        ("digest:u:p", None, False, True),
        ("", ClientTls("ca.pem"), False, True),
        ("digest:u:p", None, True, False),
        ("", None, False, False),
    ],
)
async def test_a_secured_process_without_tls_to_zookeeper_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    auth: str,
    tls: ClientTls | None,
    encrypted: bool,
    warned: bool,
) -> None:
    async def open_memory(_url: str, _ports: Ports, **_: object) -> MemoryStore:
        store = MemoryStore(MemoryTree())
        store.security = StoreSecurity(user=bool(auth), private=True, encrypted=encrypted)  # type: ignore[attr-defined]
        return store

    monkeypatch.setattr(patient_open, "open_store", open_memory)
    await patient_open.open_patiently("zk://a", Ports(), session_timeout_s=4.0, wait_s=0.0, auth=auth, tls=tls)
    assert [record.message for record in caplog.records] == ["metadata.not_encrypted"] * warned
