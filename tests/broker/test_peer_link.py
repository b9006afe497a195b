"""The connection by which one broker hears that another one lives, against real brokers."""

from __future__ import annotations

import asyncio

import pytest

from cepheid_broker.ownership.peer_link import LinkRefusedError, PeerLinks
from cepheid_security import AuthenticationError, Credentials, Principal
from tests.broker.brokers_world import BrokersWorld
from tests.roles_by_name import RolesByName
from tests.support import free_port, wait_until


@pytest.mark.parametrize(("roles", "token"), [(False, ""), (True, "broker")])
async def test_a_broker_is_heard_again_and_again(roles: bool, token: str) -> None:
    async with BrokersWorld(1, roles=roles) as world:
        heard: list[float] = []
        links = PeerLinks(token=lambda: token)
        addresses = {"pulsar": f"127.0.0.1:{world.brokers[0].port}"}
        link = asyncio.ensure_future(links.hold(addresses, lambda: heard.append(asyncio.get_running_loop().time())))
        await wait_until(lambda: len(heard) >= 3)
        assert not link.done()
        link.cancel()
        await asyncio.wait([link])


async def test_a_broker_that_wants_other_credentials_refuses_the_link_and_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: RolesByName, credentials: Credentials) -> Principal:
        raise AuthenticationError("the token is not valid")

    monkeypatch.setattr(RolesByName, "authenticate", refuse)
    async with BrokersWorld(1, roles=True) as world:
        heard: list[bool] = []
        with pytest.raises(LinkRefusedError):
            await PeerLinks(token=lambda: "old").hold({"pulsar": f"127.0.0.1:{world.brokers[0].port}"}, lambda: heard.append(True))
        assert not heard


async def test_a_port_that_no_process_has_refuses_the_connection() -> None:
    with pytest.raises(ConnectionRefusedError):
        await PeerLinks().hold({"pulsar": f"127.0.0.1:{free_port()}"}, lambda: None)


async def test_a_broker_with_tls_ports_alone_is_out_of_reach_without_tls() -> None:
    with pytest.raises(OSError, match="over TLS alone"):
        await PeerLinks().hold({"pulsar+ssl": "127.0.0.1:1"}, lambda: None)
