"""The keys of read tickets in metadata: one broker makes them, all processes follow."""

from __future__ import annotations

from cepheid_metadata import ClusterIdentity, MemoryStore, MemoryTree, cluster_identity
from cepheid_metadata.ticket_keyring import TicketKeyring, ticket_keys
from cepheid_metadata.upgrade import finish_upgrade
from cepheid_ports import Ports
from cepheid_security.read_tickets import TicketKey, TicketVerdict
from tests.support import wait_until

DAY_S = 86_400.0


async def test_a_ticket_of_one_broker_is_valid_at_every_process() -> None:
    tree = MemoryTree()
    brokers = [TicketKeyring(MemoryStore(tree), Ports()) for _ in range(2)]
    bookie = TicketKeyring(MemoryStore(tree), Ports())
    await bookie.start()  # before there is a key
    for broker in brokers:
        await broker.start(rotate_s=DAY_S)
    assert len(brokers[0].keys) == 1
    assert brokers[0].keys == brokers[1].keys, "the second one found the key of the first"
    await wait_until(lambda: bookie.keys == brokers[0].keys)
    ticket = brokers[1].sign(5, 99, "app")
    assert bookie.check(ticket, 5, 0, 99) is TicketVerdict.VALID
    assert bookie.check(ticket, 6, 0, 99) is TicketVerdict.REFUSED
    for keyring in (*brokers, bookie):
        await keyring.aclose()


async def test_a_key_that_a_bookie_missed_is_looked_up() -> None:
    store = MemoryStore(MemoryTree())
    broker, bookie = TicketKeyring(store, Ports()), TicketKeyring(store, Ports())
    await broker.start(rotate_s=DAY_S)
    await bookie.start()
    bookie._keys = {1: TicketKey(1, b"old" * 8, 0)}
    ticket = broker.sign(5, 99, "app")
    assert bookie.check(ticket, 5, 0, 99) is TicketVerdict.UNKNOWN_KEY
    await wait_until(lambda: bookie.check(ticket, 5, 0, 99) is TicketVerdict.VALID)
    await broker.aclose()
    await bookie.aclose()


async def test_a_key_that_has_signed_for_its_time_is_followed_by_another() -> None:
    now_ms = [1_000_000_000_000]
    store = MemoryStore(MemoryTree())
    ports = Ports(wall_ms=lambda: now_ms[0])
    broker = TicketKeyring(store, ports)
    await broker.start(rotate_s=DAY_S)
    (first,) = broker.keys
    now_ms[0] += round(1000 * DAY_S)
    await broker._rotate(DAY_S)
    assert len(broker.keys) == 2
    assert broker.check(broker.sign(1, 1, "r"), 1, 0, 1) is TicketVerdict.VALID
    now_ms[0] += round(1000 * DAY_S)
    await broker._rotate(DAY_S)
    assert first not in broker.keys
    found = await ticket_keys(store).get(None)
    assert found is not None
    assert {part.key_id for part in found.record.keys} == set(broker.keys)
    assert "secret" not in repr(found.record)
    await broker.aclose()


async def test_signed_tickets_are_required_when_the_upgrade_is_finished() -> None:
    """Until then readers of the previous release, whose tickets nobody signed, are served as well."""
    store = MemoryStore(MemoryTree())
    await cluster_identity(store).create(None, ClusterIdentity(cluster_id="1", name="old", created_at_ms=1))
    broker = TicketKeyring(store, Ports())
    await broker.start(rotate_s=DAY_S)
    signed = broker.sign(5, 99, "app")
    assert not broker.are_required
    assert broker.check_upgrading(b"unsigned", 5, 0, 99) is TicketVerdict.VALID
    assert broker.check_upgrading(signed, 6, 0, 99) is TicketVerdict.REFUSED, "a signed ticket is for its own ledger in any case"
    await finish_upgrade(store)
    await wait_until(lambda: broker.are_required)
    assert broker.check_upgrading(b"unsigned", 5, 0, 99) is TicketVerdict.REFUSED
    assert broker.check_upgrading(signed, 5, 0, 99) is TicketVerdict.VALID
    await broker.aclose()
