"""What we serve exists in Pulsar's API, with the success status that it has there; and every error of ours has its HTTP status."""

from __future__ import annotations

import csv
import inspect
import re
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.routing import APIRoute

from cepheid_broker import errors as broker_errors
from cepheid_broker.admin.app import ROUTERS
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.errors import HTTP_STATUSES, AdminError, http_status_of
from cepheid_broker.listener import PortInUseError
from cepheid_ports import CepheidError

TABLE = Path(__file__).parents[1] / "reference" / "pulsar-admin" / "endpoints.csv"
DOCS = Path(__file__).parents[2] / "docs" / "admin.md"
OURS = ("/cepheid/",)


def routes() -> list[APIRoute]:
    no_context = cast(AdminContext, None)  # asked for only when a request comes
    return [cast(APIRoute, route) for router in ROUTERS for route in router(no_context).routes]


def shape(path: str) -> str:
    return re.sub(r"\{\w+\}", "{}", path)


def served() -> dict[tuple[str, str], APIRoute]:
    return {
        (method, shape(route.path)): route
        for route in routes()
        for method in sorted(route.methods or ())
        if not route.path.startswith(OURS)
    }


def listed() -> dict[tuple[str, str], dict[str, str]]:
    with TABLE.open(newline="") as table:
        return {(row["method"], shape(row["path"])): row for row in csv.DictReader(table)}


@pytest.mark.parametrize("endpoint", served(), ids=" ".join)
def test_each_endpoint_is_one_of_pulsars_with_its_success_status(endpoint: tuple[str, str]) -> None:
    rows = listed()
    assert endpoint in rows, "no tool will ever call this"
    expected = int(re.match(r"\d+", rows[endpoint]["success_status"])[0])  # type: ignore[index]
    assert (served()[endpoint].status_code or 200) == expected


def test_what_issue_and_docs_promise_is_served() -> None:
    have = served()
    for endpoint in (
        ("GET", "/status.html"),
        ("GET", "/metrics"),
        ("GET", "/admin/v2/brokers/health"),
        ("PUT", "/admin/v2/clusters/{}"),
        ("PUT", "/admin/v2/tenants/{}"),
        ("PUT", "/admin/v2/namespaces/{}/{}"),
        ("PUT", "/admin/v2/persistent/{}/{}/{}"),
        ("POST", "/admin/v2/persistent/{}/{}/{}/partitions"),
        ("GET", "/admin/v2/persistent/{}/{}/{}/stats"),
        ("GET", "/lookup/v2/topic/{}/{}/{}/{}"),
    ):
        assert endpoint in have


def test_the_docs_list_what_is_served() -> None:
    rows = re.findall(r"^\| `(/[^`]+)` \| ([A-Z ]+) \|", DOCS.read_text(), re.MULTILINE)
    documented = {(method, path) for path, methods in rows for method in methods.split()}
    assert documented == {(method, route.path) for route in routes() for method in route.methods or ()}


def test_handlers_run_in_the_loop() -> None:
    """The framework runs plain functions in threads of its own, which nobody here owns."""
    for route in routes():
        pending = [route.dependant]
        while pending:
            dependant = pending.pop()
            pending += dependant.dependencies
            assert dependant.call is None or inspect.iscoroutinefunction(dependant.call), f"{route.path}: {dependant.call}"


def errors_of_ours() -> list[type[CepheidError]]:
    found: list[type[CepheidError]] = []
    pending: list[type[Any]] = [broker_errors.BrokerError]
    while pending:
        kind = pending.pop()
        pending += kind.__subclasses__()
        found.append(kind)
    return found


@pytest.mark.parametrize("kind", errors_of_ours(), ids=lambda kind: kind.__name__)
def test_every_refusal_of_the_broker_is_in_the_table(kind: type[CepheidError]) -> None:
    assert kind in HTTP_STATUSES


def test_what_is_not_in_the_table_is_503_or_500_by_what_it_says_of_itself() -> None:
    class Passing(CepheidError):
        retriable = True

    assert http_status_of(Passing("later")) == 503
    assert http_status_of(PortInUseError("no")) == 500
    assert http_status_of(AdminError("no")) == 500
