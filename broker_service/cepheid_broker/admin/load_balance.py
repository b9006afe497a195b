"""Load balancing in the API: Pulsar's load report, the views of `cepheid brokers list` and `cepheid cluster balance`, and the
leader's calls to other brokers (balancing/README.md)."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel

from cepheid_broker.admin.brokers import admin_urls, broker_id
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import NotAllowedHereError
from cepheid_broker.admin.json_body import json_body
from cepheid_broker.balancing import (
    REPORT_LIMIT_S,
    BalanceView,
    BrokerReport,
    BrokerState,
    LoadBalancer,
    Move,
    MoveOrder,
    Outcome,
    Split,
    SplitOrder,
    compared,
    local_broker_data,
    mean_load,
)
from cepheid_broker.errors import ServiceNotReadyError
from cepheid_broker.ownership import There

NO_CONTENT = 204
_PATH = "/cepheid/v1/balance"
_SHOWN_WITHIN_S = 3 + REPORT_LIMIT_S
"""The leader asks all brokers for their load before it answers."""


class LoadsBody(BaseModel):
    """Loads of brokers by id, and the ids of unsteady ones, as known to the leader."""

    loads: dict[str, float] = {}
    unsteady: list[str] = []


def load_balance(context: AdminContext) -> APIRouter:
    router = APIRouter()

    @router.get("/admin/v2/broker-stats/load-report")
    async def load_report(request: Request) -> dict[str, Any]:
        """Return the load of this broker and of each of its bundles; `load` is the number by which bundles are moved"""
        report = await context.broker.own_load.report()
        urls = admin_urls(context, request)
        ours = context.broker.ownership.brokers.get(context.broker.ownership.broker_id, {})
        return {
            **local_broker_data(report),
            "webServiceUrl": urls.get("http"),
            "webServiceUrlTls": urls.get("https"),
            "pulsarServiceUrl": f"pulsar://{ours['pulsar']}" if "pulsar" in ours else None,
            "pulsarServiceUrlTls": f"pulsar+ssl://{ours['pulsar+ssl']}" if "pulsar+ssl" in ours else None,
            "persistentTopicsEnabled": True,
            "nonPersistentTopicsEnabled": True,
            "loadReportType": "LocalBrokerData",
            "protocols": {},
        }

    @router.get(_PATH)
    async def show(request: Request) -> dict[str, Any]:
        """Return brokers with their loads, planned moves and splits with reasons, and recent ones; any broker answers"""
        balancer = context.broker.balancer
        if balancer is None:
            return _alone(context, request, await context.broker.own_load.report())
        if not balancer.is_leader:
            return await _shown_by(context, await _leader(context, balancer))
        return _shown(context, await balancer.view())

    @router.post(_PATH)
    async def balance_now(request: Request) -> list[dict[str, Any]]:
        """Carry out now the moves and splits that GET shows as the plan, even while automatic balancing is off"""
        balancer = _required(context)
        if not balancer.is_leader:
            done: list[dict[str, Any]] = await context.broker.peers.call(await _leader(context, balancer), "POST", _PATH)
            return done
        return [_outcome(outcome) for outcome in await balancer.balance_now()]

    @router.post(f"{_PATH}/report")
    async def report(body: Annotated[LoadsBody, json_body(LoadsBody)]) -> dict[str, Any]:
        """For the leader: take the loads of all brokers, return the load report of this one"""
        if context.broker.balancer is not None:
            context.broker.balancer.learn_loads(body.loads, body.unsteady)
        return local_broker_data(await context.broker.own_load.report())

    @router.post(f"{_PATH}/move", status_code=NO_CONTENT)
    async def move(order: Annotated[MoveOrder, json_body(MoveOrder)]) -> None:
        """For the leader: hand a bundle of this broker over to another one"""
        await _required(context).orders.move(order)

    @router.post(f"{_PATH}/split", status_code=NO_CONTENT)
    async def split(order: Annotated[SplitOrder, json_body(SplitOrder)]) -> None:
        """For the leader: split a bundle of this broker"""
        await _required(context).orders.split(order)

    return router


def _required(context: AdminContext) -> LoadBalancer:
    if context.broker.balancer is None:
        raise NotAllowedHereError("There is one broker: nothing can be moved")
    return context.broker.balancer


async def _leader(context: AdminContext, balancer: LoadBalancer) -> There:
    """Return the leader. Raises ServiceNotReadyError if there is none, or it is this broker, which does not know it yet."""
    record = await balancer.leader()
    ownership = context.broker.ownership
    if record is None or record.broker_id == ownership.broker_id or record.broker_id not in ownership.brokers:
        raise ServiceNotReadyError("no broker is the leader at the moment: ask again in some seconds")
    return There(record.broker_id, ownership.brokers[record.broker_id])


async def _shown_by(context: AdminContext, leader: There) -> dict[str, Any]:
    try:
        async with asyncio.timeout(_SHOWN_WITHIN_S):
            found: dict[str, Any] = await context.broker.peers.call(leader, "GET", _PATH)
            return found
    except TimeoutError:
        message = f"the leader, {leader.broker_id}, does not answer within {_SHOWN_WITHIN_S:g} s: ask again in some seconds"
        raise ServiceNotReadyError(message) from None


def _shown(context: AdminContext, view: BalanceView) -> dict[str, Any]:
    states = {state.broker_id: state for state in view.brokers}
    rows = []
    for name, addresses in context.broker.ownership.brokers.items():
        address = addresses.get("http") or addresses.get("https") or ""
        rows.append(_row(name, address, _state(name, view, states.get(name)), view.reports.get(name), states.get(name)))
    return {
        "leader": view.leader.broker_id,
        "leader_since_ms": view.leader.since_ms,
        "settings": view.settings.model_dump(),
        "mean_load": mean_load(compared(view.brokers)),
        "brokers": rows,
        "plan": [*map(_action, view.plan.splits), *map(_action, view.plan.moves)],
        "notes": list(view.plan.notes),
        "recent": [_outcome(outcome) for outcome in view.recent],
    }


def _state(name: str, view: BalanceView, known: BrokerState | None) -> str:
    if name in view.missing:
        return "missing"
    if name in view.leaving:
        return "draining"
    return "serving" if known is None or known.takes else "unsteady"


def _alone(context: AdminContext, request: Request, report: BrokerReport) -> dict[str, Any]:
    name = broker_id(context, request)
    return {
        "leader": None,
        "leader_since_ms": None,
        "settings": None,
        "mean_load": report.load,
        "brokers": [_row(context.broker.ownership.broker_id or name, name, "serving", report, None)],
        "plan": [],
        "notes": ["there is one broker: nothing can be moved"],
        "recent": [],
    }


def _row(name: str, address: str, state: str, report: BrokerReport | None, known: BrokerState | None) -> dict[str, Any]:
    found = report or BrokerReport(name)
    return {
        "broker_id": name,
        "address": address,
        "state": state,
        "load": found.load if known is None else known.load,
        "cpu": found.cpu,
        "messages_per_s": found.messages_per_s,
        "topics": found.topics,
        "bundles": len(found.bundles),
        "memory_bytes": found.memory_bytes,
    }


def _action(action: Move | Split) -> dict[str, Any]:
    common = {"bundle": action.bundle, "why": action.why}
    if isinstance(action, Move):
        return {"action": "move", **common, "from": action.source, "to": action.target, "load": action.load}
    return {"action": "split", **common, "from": action.broker, "to": None, "by": action.by}


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {"at_ms": outcome.at_ms, **_action(outcome.action), "error": outcome.error or None, "unanswered": outcome.unanswered}
