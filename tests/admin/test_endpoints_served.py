"""What we serve exists in Pulsar's API, with the success status that it has there; and every error of ours has its HTTP status."""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

import pytest
from fastapi.routing import APIRoute

from cepheid_broker import errors as broker_errors
from cepheid_broker.admin.errors import HTTP_STATUSES, AdminError, http_status_of
from cepheid_broker.admin.unserved import unserved
from cepheid_broker.protocol import PortInUseError
from cepheid_ports import CepheidError
from tests.admin import admin_page
from tests.admin.admin_page import PAGE, Endpoint, endpoints, shape, with_tables
from tests.admin.admin_world import AdminWorld

OURS = ("/cepheid/", "/health", "/ready")  # probes of every role are alike


@cache
def routes() -> list[APIRoute]:
    return admin_page.routes()


@cache
def served() -> dict[tuple[str, str], APIRoute]:
    """By method and shape of the path; what is ours and not Pulsar's left out."""
    found = [(route, method) for route in routes() for method in sorted(route.methods or ())]
    return {(method, shape(route.path)): route for route, method in found if not route.path.startswith(OURS)}


@cache
def listed() -> dict[tuple[str, str], Endpoint]:
    return {endpoint.call: endpoint for endpoint in endpoints()}


def test_each_route_is_one_of_pulsars_with_its_success_status() -> None:
    assert not served().keys() - listed().keys(), "no tool will ever call these"
    statuses = {call: route.status_code or 200 for call, route in served().items()}
    assert statuses == {call: listed()[call].success_status for call in served()}


def test_everything_of_pulsars_api_is_served_or_has_a_reason_why_not() -> None:
    have = served()
    succeeds = [endpoint for endpoint in endpoints() if endpoint.success_status is not None]
    missing = [endpoint for endpoint in succeeds if endpoint.call not in have and unserved(endpoint.path) is None]
    assert not missing


NOT_YET = {
    ("PUT", "/admin/v2/persistent/{}/{}/{}/compaction"),
    ("GET", "/admin/v2/persistent/{}/{}/{}/compaction"),
    ("POST", "/admin/v2/bookies/racks-info/{}"),
    ("DELETE", "/admin/v2/bookies/racks-info/{}"),
}


def test_of_the_first_tier_everything_is_served_but_what_does_not_exist_at_all() -> None:
    """Compaction, racks."""
    have = served()
    assert {call for call, endpoint in listed().items() if endpoint.tier == "1" and call not in have} == NOT_YET


def test_no_route_is_shadowed_by_one_before_it() -> None:
    """`{cluster}` would take `configuration`: whoever comes first gets the call."""
    found = routes()
    for index, route in enumerate(found):
        for method in route.methods or ():
            path = route.path.format(**dict.fromkeys(route.param_convertors, "x~y"))
            taker = next(each for each in found if method in (each.methods or ()) and each.path_regex.match(path))
            assert taker is route, f"{method} {route.path} goes to {taker.path}, {index - found.index(taker)} before it"


def test_what_is_not_served_is_taken_by_no_other_route(admin: AdminWorld) -> None:
    """A row of Pulsar's API whose last word another route takes for a name would be answered with an error about that name."""
    names = {"tenant": "public", "namespace": "default", "cluster": "standalone"}
    assert admin.put("/admin/v2/persistent/public/default/x").status_code == 204
    for endpoint in endpoints():
        if endpoint.call in served() or endpoint.method not in ("GET", "PUT", "POST", "DELETE"):
            continue
        path = re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], "x"), endpoint.path)
        answer = admin.ask(endpoint.method, path)
        allowed = (400, 405, 406, 412) if "/non-persistent/" in path else ()  # for what only stored topics have (behaviours.md §5)
        assert answer.status_code in (501, *allowed), f"{endpoint.method} {path}: {answer.status_code} {answer.text}"


@pytest.mark.page
def test_the_page_is_what_the_routes_are() -> None:
    page = PAGE.read_text()
    assert with_tables(page) == page, "run: python -m tests.admin.admin_page"


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


def test_every_refusal_of_the_broker_is_in_the_table() -> None:
    assert not [kind for kind in errors_of_ours() if kind not in HTTP_STATUSES]


def test_what_is_not_in_the_table_is_503_or_500_by_what_it_says_of_itself() -> None:
    class Passing(CepheidError):
        retriable = True

    assert http_status_of(Passing("later")) == 503
    assert http_status_of(PortInUseError("no")) == 500
    assert http_status_of(AdminError("no")) == 500
