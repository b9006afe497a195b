"""How long does it take until a change of permissions is in force on every broker?

A role asks each broker, again and again, for the partitions of a topic, which needs a permission. An administrator grants and
revokes at one broker; the time counts from before that call until the last broker answers accordingly.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import time
import urllib.request
from base64 import b64encode
from typing import Any

from benchmarks import load
from benchmarks.cluster import Cluster, add_arguments
from benchmarks.raw_client import Connection, Shown, open_connection
from benchmarks.report import percentile, print_line
from benchmarks.secured_server import ROLE
from cepheid_security.token_keys import secret_key
from cepheid_security.tokens import create_token
from cepheid_wire import pulsar_api_pb2 as pb

_ASK_EVERY_S = 0.005
_GIVEN_UP_S = 30.0


class Administrator:
    """The super-user, at the admin API of one broker."""

    def __init__(self, admin_url: str, token: str) -> None:
        self._url = f"{admin_url}/admin/v2/namespaces/public/default/permissions/{ROLE}"
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}

    def grant(self) -> None:
        self._call("POST", ["produce"])

    def revoke(self) -> None:
        self._call("DELETE")

    def _call(self, method: str, body: Any = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self._url, data, self._headers, method=method), timeout=30):
            pass


async def is_allowed(connection: Connection, topic: str) -> bool:
    answer = await connection.ask(pb.CommandPartitionedTopicMetadata(topic=topic, metadata_auto_creation_enabled=False))
    is_refused = answer.response == pb.CommandPartitionedTopicMetadataResponse.Failed
    return not (is_refused and answer.error == pb.AuthorizationError)


async def seconds_until(change: Any, connections: list[Connection], topic: str, allowed: bool) -> float:
    began = time.monotonic()
    changing = asyncio.ensure_future(asyncio.to_thread(change))
    waiting = list(connections)
    while waiting:
        waiting = [connection for connection in waiting if await is_allowed(connection, topic) is not allowed]
        if time.monotonic() - began > _GIVEN_UP_S:
            raise TimeoutError(f"{len(waiting)} of {len(connections)} brokers do not know it after {_GIVEN_UP_S:g} s")
        await asyncio.sleep(_ASK_EVERY_S)
    took = time.monotonic() - began
    await changing
    return took


async def measure(cluster: Cluster, administrator: Administrator, token: str, rounds: int) -> dict[str, float]:
    topic = cluster.topic("permission-change")
    urls = [f"pulsar://127.0.0.1:{port}" for port in cluster.processes.broker_ports.values()]
    connections = [await open_connection(url, shown=Shown(token=token)) for url in urls]
    granted, revoked = [], []
    for number in range(rounds + 1):
        took = [
            await seconds_until(administrator.grant, connections, topic, True),
            await seconds_until(administrator.revoke, connections, topic, False),
        ]
        if number:  # the first round reads what brokers do not know yet
            granted.append(took[0])
            revoked.append(took[1])
    for connection in connections:
        connection.close()
    return {
        "grant_s_p50": round(percentile(granted, 0.5), 4),
        "grant_s_max": round(max(granted), 4),
        "revoke_s_p50": round(percentile(revoked, 0.5), 4),
        "revoke_s_max": round(max(revoked), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser, bookies=1, brokers=3)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    data_url = f"data:;base64,{b64encode(secrets.token_bytes(64)).decode()}"
    key = secret_key(data_url)
    now_ms = time.time_ns() // 1_000_000
    broker = {
        "authentication": {"methods": ["token"], "secret_keys": [data_url]},
        "authorization": {"enabled": True, "super_user_roles": ["root"], "peer_roles": ["broker"]},
    }
    with Cluster(arguments, {"broker": broker}) as cluster:
        administrator = Administrator(cluster.processes.admin_urls[0], create_token(key, "root", now_ms))
        figures = load.run(measure(cluster, administrator, create_token(key, ROLE, now_ms), arguments.rounds))
        print_line(
            "permission_change",
            figures=figures,
            load={"rounds": arguments.rounds, "asked_every_s": _ASK_EVERY_S},
            settings={"bookies": arguments.bookies, "brokers": arguments.brokers},
        )


if __name__ == "__main__":
    main()
