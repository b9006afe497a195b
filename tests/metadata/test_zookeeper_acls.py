"""ACLs in a real ZooKeeper: what a cluster with credentials creates, and what it had before it got them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from cepheid_dev.zookeeper_server import ZooKeeperServer
from cepheid_metadata import AccessDeniedError, Create, Delete, Put, keys
from cepheid_metadata.open_store import AUTH_FILE_VARIABLE, StoreUrlError, open_store
from cepheid_metadata.ticket_keyring import TicketKeyring
from cepheid_metadata.zookeeper_acls import set_cluster_acls
from cepheid_ports import Ports
from tests.support import free_port
from tests.zookeeper_support import new_chroot, shared_zookeeper

AUTH = "digest:cepheid:s3cret-word"


@pytest.fixture
def url() -> str:
    return f"zk://{shared_zookeeper().address}{new_chroot()}"


@pytest.fixture
def supervisor() -> Iterator[Any]:
    """Reads ACLs, which everybody may where a node is open."""
    client = KazooClient(hosts=shared_zookeeper().address, auth_data=[("digest", AUTH.removeprefix("digest:"))])
    client.start()
    yield client
    client.stop()
    client.close()


def open_nodes(client: Any, path: str) -> list[str]:
    """Those below (and at) `path` that the world may do anything with."""
    acls, _ = client.get_acls(path)
    found = [path] if any(acl.id.scheme == "world" for acl in acls) else []
    return found + [each for name in client.get_children(path) for each in open_nodes(client, f"{path}/{name}")]


async def test_no_node_of_a_cluster_with_credentials_is_readable_by_the_world(url: str, supervisor: Any) -> None:
    store = await open_store(url + "/deep", Ports(), auth=AUTH)
    await store.create("/alone", b"")
    await store.create("/with/its/parents", b"")
    await store.create("/ephemeral", b"", ephemeral=True)
    await store.create("/numbered-", b"", sequential=True)
    await store.multi([Create("/several/a", b""), Create("/several/b", b""), Put("/alone", b"2", 0)])
    root = url.partition(shared_zookeeper().address)[2]
    assert open_nodes(supervisor, root) == []
    await store.aclose()


async def test_nodes_from_before_get_the_acl_and_lose_it_again(url: str, supervisor: Any) -> None:
    before = await open_store(url, Ports(), auth="")
    for number in range(30):
        await before.create(f"/tree/{number}/leaf", b"x")
    root = url.partition(shared_zookeeper().address)[2]
    assert len(open_nodes(supervisor, root)) == 62
    assert set_cluster_acls(url, auth=AUTH).nodes == 62
    assert open_nodes(supervisor, root) == []
    with pytest.raises(AccessDeniedError):
        await before.get("/tree/3/leaf")
    with pytest.raises(AccessDeniedError, match="belong to another ZooKeeper user"):
        set_cluster_acls(url, auth="digest:cepheid:guess")
    assert set_cluster_acls(url, auth=AUTH, everybody=True).nodes == 62
    assert await before.get("/tree/3/leaf") is not None
    await before.aclose()


async def test_a_process_with_credentials_may_leave_nodes_open_for_those_without(url: str) -> None:
    """The first of two rolling restarts."""
    first = await open_store(url, Ports(), auth=AUTH, private=False)
    without = await open_store(url, Ports(), auth="")
    await first.create("/a", b"x")
    await without.put("/a", b"y", 0)
    await first.aclose()
    await without.aclose()


async def test_secrets_are_for_the_cluster_alone_wherever_it_has_credentials(url: str, supervisor: Any) -> None:
    """Also where other nodes are still open, and once another process found them open."""
    root = url.partition(shared_zookeeper().address)[2]
    beside = await open_store(url, Ports(), auth=AUTH, private=False)
    await beside.create(keys.TICKET_KEYS_KEY, b"secret")
    assert open_nodes(supervisor, root) == [root]
    set_cluster_acls(url, auth=AUTH, everybody=True)
    again = await open_store(url, Ports(), auth=AUTH, private=False)
    assert f"{root}/secrets/ticket-keys" in open_nodes(supervisor, root), "a process without credentials may need it yet"
    private = await open_store(url, Ports(), auth=AUTH)
    assert open_nodes(supervisor, root) == [root]
    assert await beside.get(keys.TICKET_KEYS_KEY) is not None
    for store in (beside, again, private):
        await store.aclose()


@pytest.mark.parametrize(
    ("auth", "private", "problem"),
    [
        (AUTH, True, None),
        (AUTH, False, "may be readable by every client that reaches ZooKeeper while metadata_private is false"),
        ("", True, "every client that can reach ZooKeeper can read the keys of read tickets: set metadata_auth_file"),
    ],
)
async def test_open_ticket_keys_are_named(
    url: str, caplog: pytest.LogCaptureFixture, auth: str, private: bool, problem: str | None
) -> None:
    store = await open_store(url, Ports(), auth=auth, private=private)
    keyring = TicketKeyring(store, Ports())
    await keyring.start(rotate_s=86_400.0)
    assert (keyring.problem is None) if problem is None else (problem in (keyring.problem or ""))
    assert ("ticket_keys.open" in [record.message for record in caplog.records]) == (problem is not None)
    await keyring.aclose()
    await store.aclose()


async def test_credentials_come_from_a_file(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "metadata.auth"
    file.write_text(f"{AUTH}\n")
    monkeypatch.setenv(AUTH_FILE_VARIABLE, str(file))
    store = await open_store(url, Ports())
    await store.create("/a", b"x")
    await store.aclose()
    monkeypatch.setenv(AUTH_FILE_VARIABLE, "")
    with pytest.raises(AccessDeniedError):
        await open_store(url, Ports(), auth="digest:x:y")
    monkeypatch.setenv(AUTH_FILE_VARIABLE, str(tmp_path / "missing"))
    with pytest.raises(StoreUrlError, match="missing with the credentials for the metadata store cannot be read"):
        await open_store(url, Ports())


async def test_where_the_cluster_has_all_of_zookeeper_nobody_else_changes_its_top(tmp_path: Path) -> None:
    """Who may write a node may delete its children, and create others in their place."""
    server = ZooKeeperServer(tmp_path, free_port())
    server.start()
    url = f"zk://{server.address}"
    try:
        before = await open_store(url, Ports(), auth="")
        await before.create("/old", b"x")
        store = await open_store(url, Ports(), auth=AUTH)
        await store.create("/revocations", b"x")
        for change in (Delete("/revocations", 0), Delete("/old", 0), Create("/permissions", b"mine")):
            with pytest.raises(AccessDeniedError):
                await before.multi([change])
        set_cluster_acls(url, auth=AUTH, everybody=True)
        await before.multi([Delete("/old", 0)])
        set_cluster_acls(url, auth=AUTH)
        with pytest.raises(AccessDeniedError):
            await before.create("/new", b"")
        await store.aclose()
        await before.aclose()
    finally:
        server.kill()


def test_only_zookeeper_has_acls() -> None:
    with pytest.raises(StoreUrlError, match="only ZooKeeper has ACLs"):
        set_cluster_acls("rocksdb:///x", auth=AUTH)
    with pytest.raises(StoreUrlError, match="name its credentials"):
        set_cluster_acls("zk://127.0.0.1:1/x", auth="")
