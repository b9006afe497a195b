"""An admin API with tokens and authorization, and two tenants: things of `a` are asked for, and roles of `b` may not see them.

root      super-user                       a-admin, b-admin   administrators of the tenants
a-user    produce and consume on a/n       a-reader           consume on the topic a/n/mine alone
broker    another broker of the cluster    proxy              speaks for others
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from cepheid_security.token_keys import secret_key
from cepheid_security.tokens import create_token
from tests.admin.admin_world import AdminWorld, running_admin

KEY = f"data:;base64,{base64.b64encode(bytes(range(32))).decode()}"
A_NAMESPACE = "/admin/v2/namespaces/a/n"
A_TOPICS = "/admin/v2/persistent/a/n"


def token(role: str) -> str:
    return create_token(secret_key(KEY), role, time.time_ns() // 1_000_000)


def bearer(role: str) -> dict[str, str]:
    """Headers of a client with this role; none for a stranger, ""."""
    return {"Authorization": f"Bearer {token(role)}"} if role else {}


class SecuredWorld:
    def __init__(self, admin: AdminWorld, data_dir: Path) -> None:
        self.admin = admin
        self.audit_file = data_dir / "audit" / "audit.log"

    def ask(self, role: str, method: str, path: str, headers: dict[str, str] | None = None, **request: Any) -> httpx.Response:
        return self.admin.ask(method, path, headers={**bearer(role), **(headers or {})}, **request)

    def do(self, role: str, method: str, path: str, **request: Any) -> Any:
        """The answer of a call that must succeed."""
        answer = self.ask(role, method, path, **request)
        assert answer.is_success, f"{role}: {method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else None

    def audited(self) -> list[dict[str, Any]]:
        """The lines of the audit log, once those of all calls before are written."""

        async def written() -> None:
            audit = self.admin.standalone.broker.audit
            while audit.figures().waiting:  # noqa: ASYNC110 - the log tells nobody
                await asyncio.sleep(0.005)

        self.admin.run(written())
        return [json.loads(line) for line in self.audit_file.read_text().splitlines()]


@contextmanager
def running_secured(data_dir: Path, **settings: Any) -> Iterator[SecuredWorld]:
    authorization = {
        "enabled": True,
        "super_user_roles": ["root"],
        "proxy_roles": ["proxy"],
        "peer_roles": ["broker"],
        "monitoring_roles": ["prometheus"],
        **settings.pop("authorization", {}),
    }
    authentication = {"methods": ["token"], "secret_keys": [KEY]}
    with running_admin(data_dir, authentication=authentication, authorization=authorization, **settings) as admin:
        world = SecuredWorld(admin, data_dir)
        for tenant in "ab":
            body = {"adminRoles": [f"{tenant}-admin"], "allowedClusters": ["standalone"]}
            world.do("root", "PUT", f"/admin/v2/tenants/{tenant}", json=body)
            world.do(f"{tenant}-admin", "PUT", f"/admin/v2/namespaces/{tenant}/n")
        world.do("a-admin", "PUT", f"{A_TOPICS}/mine")
        world.do("a-admin", "PUT", f"{A_TOPICS}/other")
        world.do("a-admin", "PUT", f"{A_TOPICS}/parts/partitions", json=2)
        world.do("a-admin", "POST", f"{A_NAMESPACE}/permissions/a-user", json=["produce", "consume"])
        world.do("a-admin", "POST", f"{A_TOPICS}/mine/permissions/a-reader", json=["consume"])
        yield world
