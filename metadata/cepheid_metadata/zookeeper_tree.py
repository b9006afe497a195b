"""The keys of one root in ZooKeeper, read and written through the lane of a session, independent of how sessions begin and end.

    write ──► the operations unchanged ──no such parent──► look which are missing ──► one transaction that also creates them

A create without its parents is definitely refused, so nothing is written twice; if others create the same parents meanwhile,
they are looked up again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import KazooException, NoAuthError, NoNodeError
from kazoo.security import CREATOR_ALL_ACL, READ_ACL_UNSAFE, Permissions

from cepheid_metadata.errors import AccessDeniedError, KeyExistsError, MetadataError, NoSuchKeyError, StoreUnavailableError
from cepheid_metadata.keys import SECRETS_KEY, TICKET_KEYS_KEY
from cepheid_metadata.request_lane import RequestLane
from cepheid_metadata.store import Create, Delete, Op, OpResult, Versioned, check_ops
from cepheid_metadata.tree import ROOT
from cepheid_metadata.zookeeper_requests import (
    answers_of,
    check_size,
    error_of,
    failing_index,
    needs_stat,
    parents_to_check,
    refusal_of,
    result_of,
    send_ops,
    with_parents,
)

MAX_PARENT_TRIES = 20
OWN_NODES_OF_ZOOKEEPER = "zookeeper"
TOP_ACL = [*CREATOR_ALL_ACL, *READ_ACL_UNSAFE]
"""ACL of the node `/`, if the cluster has it to itself and creates nodes for one user."""


class ZooKeeperTree:
    """The tree. `own_keys`: the ephemeral keys that were or may have been created, for the owner of the session.

    `has_user`: this process has a user in ZooKeeper, so secrets are created for that user only, whatever applies to other keys.
    """

    def __init__(self, lane: RequestLane, root: str, *, has_user: bool = False) -> None:
        self._has_user = has_user
        self._lane = lane
        self._root = root
        self.own_keys: dict[str, None] = {}

    def path(self, key: str) -> str:
        return (self._root or ROOT) if key == ROOT else self._root + key

    async def get(self, key: str) -> Versioned | None:
        path = self.path(key)
        try:
            value, stat = await self._read(key, lambda client: client.get_async(path))
        except NoNodeError:
            return None
        return Versioned(value or b"", stat.version)

    async def stat(self, key: str, *, at_once: bool = False) -> Any:
        """Return ZooKeeper's stat; None: the key does not exist."""
        path = self.path(key)
        return await self._read(key, lambda client: client.exists_async(path), at_once=at_once)

    async def children(self, key: str) -> list[str]:
        path = self.path(key)
        try:
            names: list[str] = await self._read(key, lambda client: client.get_children_async(path))
        except NoNodeError:
            raise NoSuchKeyError(f"{key} does not exist", key=key) from None
        return sorted(name for name in names if path != ROOT or name != OWN_NODES_OF_ZOOKEEPER)

    async def sync(self, key: str) -> None:
        path = self.path(key)
        with contextlib.suppress(NoNodeError):
            await self._read(key, lambda client: client.sync_async(path))

    def catch_up(self, client: Any) -> Any:
        """Sync everything, at the start of a connection."""
        return client.sync_async(self.path(ROOT))

    async def _read(self, key: str, send: Callable[[Any], Any], *, at_once: bool = False) -> Any:
        try:
            return await self._lane.ask(send, f"read {key}", at_once=at_once)
        except NoNodeError:
            raise
        except KazooException as error:
            raise refusal_of(key, error, is_write=False) from None

    async def write(self, ops: Sequence[Op]) -> list[OpResult]:
        check_ops(ops)
        check_size(ops, self._root)
        if not ops:
            return []
        try:
            return await self._commit(ops)
        except NoSuchKeyError as error:
            if not isinstance(ops[error.op_index or 0], Create):
                raise
        return await self._commit_with_parents(ops)

    async def _commit_with_parents(self, ops: Sequence[Op]) -> list[OpResult]:
        for _ in range(MAX_PARENT_TRIES):
            parents = parents_to_check(ops)
            found = await asyncio.gather(*(self.stat(key) for key in parents), return_exceptions=True)
            for each in found:
                if isinstance(each, BaseException):
                    raise each
            planned = with_parents(ops, {key: each is not None for key, each in zip(parents, found, strict=True)})
            try:
                results = await self._commit([op for op, _ in planned])
            except MetadataError as error:
                op, place = planned[error.op_index or 0]
                was_made_by_others = place is None and isinstance(error, KeyExistsError)
                if was_made_by_others or (isinstance(op, Create) and isinstance(error, NoSuchKeyError)):
                    continue
                if error.op_index is not None:
                    error.op_index = error.facts["op_index"] = place if len(ops) > 1 else None
                raise
            return [result for (_, place), result in zip(planned, results, strict=True) if place is not None]
        raise StoreUnavailableError(f"{ops[0].key}: its parents come and go; nothing was written", key=ops[0].key)

    async def _commit(self, ops: Sequence[Op]) -> list[OpResult]:
        # Before the outcome is known: an answer may be lost.
        self.own_keys.update({op.key: None for op in ops if isinstance(op, Create) and op.ephemeral and not op.sequential})
        what = f"write {ops[0].key}" + (f" and {len(ops) - 1} more" if len(ops) > 1 else "")
        try:
            answer = await self._lane.ask(lambda client: send_ops(client, ops, self.path, self._acl_of), what, is_write=True)
        except KazooException as error:
            raise await self._explain(ops[0], error) from None
        answers = answers_of(ops, answer)
        if (index := failing_index(answers)) is not None:
            failed = await self._explain(ops[index], answers[index])
            if len(ops) > 1:
                failed.op_index = failed.facts["op_index"] = index
            raise failed
        results = [result_of(op, each, self._root) for op, each in zip(ops, answers, strict=True)]
        self._note_own_keys(ops, results)
        return results

    def _acl_of(self, key: str) -> Any:
        """Return the ACL of a key to be created; None: that of the connection."""
        is_secret = key == SECRETS_KEY or key.startswith(f"{SECRETS_KEY}/")
        return CREATOR_ALL_ACL if is_secret and self._has_user else None

    def _note_own_keys(self, ops: Sequence[Op], results: Sequence[OpResult]) -> None:
        for op, result in zip(ops, results, strict=True):
            if isinstance(op, Create) and op.ephemeral and op.sequential:
                self.own_keys[str(result)] = None
            elif isinstance(op, Delete):
                self.own_keys.pop(op.key, None)

    async def _explain(self, op: Op, error: Exception) -> MetadataError:
        """ZooKeeper's errors carry no numbers: they are asked for, so that ours say what is there."""
        stat = None
        if needs_stat(error):
            with contextlib.suppress(MetadataError):
                stat = await self.stat(op.key)
        assert isinstance(error, KazooException), error
        return error_of(op, error, stat)

    async def make_root(self, *, private: bool = False) -> None:
        """The root itself, as a key of a tree without one.

        `private`: what is created is for one user. A tree without a root makes `/` read-only for others then, since ZooKeeper lets
        whoever may write a node delete its children, and create others. Raises AccessDeniedError where `/` is another user's.
        """
        if private and not self._root:
            await self._close_top()
        if self._root:
            above = ZooKeeperTree(self._lane, "")
            if await above.stat(self._root) is None:
                with contextlib.suppress(KeyExistsError):
                    await above.write([Create(self._root, b"")])

    async def close_secrets(self) -> None:
        """Give the secrets to this process's user alone: they were created for everybody while the cluster had no user.

        Raises AccessDeniedError where they are another user's.
        """
        for key in (SECRETS_KEY, TICKET_KEYS_KEY):
            await self._close_secret(key)

    async def _close_secret(self, key: str) -> None:
        path = self.path(key)
        try:
            acls, _ = await self._lane.ask(lambda client: client.get_acls_async(path), f"read the ACL of {key}")
            if any(acl.id.scheme == "world" for acl in acls):
                await self._lane.ask(
                    lambda client: client.set_acls_async(path, CREATOR_ALL_ACL), f"set the ACL of {key}", is_write=True
                )
        except NoNodeError:
            pass  # none were made yet
        except NoAuthError:
            raise AccessDeniedError(
                f"{key} is another ZooKeeper user's: give this process that user (metadata_auth_file)", key=key
            ) from None

    async def _close_top(self) -> None:
        try:
            acls, _ = await self._lane.ask(lambda client: client.get_acls_async("/"), "read the ACL of /")
            if any(acl.id.scheme == "world" and acl.perms & ~Permissions.READ for acl in acls):
                await self._lane.ask(lambda client: client.set_acls_async("/", TOP_ACL), "set the ACL of /", is_write=True)
        except NoAuthError:
            raise AccessDeniedError(
                "the node / of ZooKeeper is another user's: name a node of the cluster's own, as in zk://host:2181/name", key="/"
            ) from None
