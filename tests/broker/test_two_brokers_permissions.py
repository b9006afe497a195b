"""Calls on parts of a topic that two brokers serve, where authorization is on: brokers make them for the client they authorized."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.broker.brokers_world import BrokersWorld
from tests.support import wait_until

pytestmark = pytest.mark.slow

TOPIC = "/admin/v2/persistent/public/default/p"
PARTS = 8
AUTHORIZATION = {"enabled": True, "super_user_roles": ["root"], "peer_roles": ["broker"]}


async def ask(world: BrokersWorld, role: str, method: str, path: str, **request: Any) -> httpx.Response:
    """Of the first broker; a redirect is followed with the credentials."""
    url = f"{world.brokers[0].admin_url}{path}"
    async with httpx.AsyncClient(timeout=20) as client:
        answer = await client.request(method, url, headers={"Authorization": f"Bearer {role}"}, **request)
        if answer.status_code == 307:
            url = answer.headers["location"]
            answer = await client.request(method, url, headers={"Authorization": f"Bearer {role}"}, **request)
    return answer


async def test_a_call_on_all_parts_reaches_both_brokers_with_the_clients_role_in_their_audit_logs() -> None:
    async with BrokersWorld(admin=True, roles=True, authorization=AUTHORIZATION) as world:
        tenant = {"adminRoles": ["ann"], "allowedClusters": ["standalone"]}
        assert (await ask(world, "root", "POST", "/admin/v2/tenants/public", json=tenant)).status_code == 204
        calls: list[tuple[str, str, Any, int]] = [
            ("PUT", f"{TOPIC}/partitions", PARTS, 204),
            ("PUT", f"{TOPIC}/subscription/s", None, 204),
            ("GET", f"{TOPIC}/subscriptions", None, 200),
            ("POST", f"{TOPIC}/subscription/s/skip_all", None, 204),
            ("GET", f"{TOPIC}/partitioned-stats", None, 200),
            ("GET", "/cepheid/v1/plan?topic=persistent://public/default/p", None, 200),
            ("POST", "/admin/v2/namespaces/public/default/clearBacklog", None, 204),
            ("PUT", f"{TOPIC}/unload", None, 204),
            ("POST", f"{TOPIC}/terminate/partitions", None, 200),
            ("DELETE", f"{TOPIC}/partitions?force=true", None, 204),
        ]
        for method, path, body, status in calls:
            answer = await ask(world, "ann", method, path, **({} if body is None else {"json": body}))
            assert answer.status_code == status, f"{method} {path}: {answer.status_code} {answer.text}"
        by_peers = lambda: [line for broker in world.brokers for line in broker.audited if line.get("role") == "broker"]  # noqa: E731
        await wait_until(lambda: bool(by_peers()))
        assert {line.get("original_role") for line in by_peers()} == {"ann"}
        assert not [line for line in by_peers() if line["result"] == "denied"]


async def test_a_client_that_may_not_is_refused_by_the_broker_that_it_asks() -> None:
    async with BrokersWorld(admin=True, roles=True, authorization=AUTHORIZATION) as world:
        assert (await ask(world, "root", "PUT", f"{TOPIC}/partitions", json=PARTS)).status_code == 204
        for method, path in (("PUT", f"{TOPIC}/unload"), ("GET", f"{TOPIC}/partitioned-stats"), ("DELETE", f"{TOPIC}/partitions")):
            answer = await ask(world, "nobody", method, path)
            assert (answer.status_code, "role 'nobody'" in answer.json()["reason"]) == (403, True)
        assert not [line for broker in world.brokers for line in broker.audited if line.get("role") == "broker"]
