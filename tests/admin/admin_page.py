"""Write the tables of docs/admin.md from the routes and from the table of Pulsar's API: `python -m tests.admin.admin_page`.

It rewrites what is between `<!-- NAME: generated -->` and `<!-- /NAME -->`; a test compares. A route's note is the docstring of its
function, which /openapi.json has too.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from fastapi.routing import APIRoute

from cepheid_broker.admin.app import ROUTERS
from cepheid_broker.admin.context import AdminContext
from cepheid_broker.admin.openapi import routes_of
from cepheid_broker.admin.unserved import unserved

PAGE = Path(__file__).parents[2] / "docs" / "admin.md"
TABLE = Path(__file__).parents[1] / "reference" / "pulsar-admin" / "endpoints.csv"
METHODS = ("GET", "PUT", "POST", "DELETE")
_TOPIC = "/admin/v2/persistent/{tenant}/{namespace}/{topic}"
_SECTIONS = (
    ("Health and metrics", r"/status\.html|/metrics|/health|/ready|/admin/v2/brokers/(ready|health|version)"),
    ("Brokers and bookies", r"/admin/v2/(brokers|broker-stats|bookies).*"),
    ("Clusters and tenants", r"/admin/v2/(clusters|tenants).*"),
    ("Namespaces", r"/admin/v2/namespaces.*"),
    ("Schemas", r"/admin/v2/schemas.*"),
    ("Subscriptions", r"/admin/v2/persistent/.*/(subscription/.*|subscriptions|all_subscription/.*)"),
    ("Persistent topics", r"/admin/v2/persistent.*"),
    ("Non-persistent topics", r"/admin/v2/non-persistent.*"),
    ("Lookup", r"/lookup/.*"),
    ("Ours, not Pulsar's", r"/cepheid/.*"),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A row of the table of Pulsar's API."""

    method: str
    path: str
    tier: str
    success_status: int | None

    @property
    def call(self) -> tuple[str, str]:
        return self.method, shape(self.path)


def shape(path: str) -> str:
    """Paths that differ in the names of their parameters only are one."""
    return re.sub(r"\{\w+\}", "{}", path)


def routes() -> list[APIRoute]:
    no_context = cast(AdminContext, None)  # asked for only when a request comes
    return [route for router in ROUTERS for route in routes_of(router(no_context))]


def endpoints() -> list[Endpoint]:
    """Return the rows of the table of Pulsar's API."""
    found: list[Endpoint] = []
    with TABLE.open(newline="") as rows:
        for row in csv.DictReader(rows):
            status = re.match(r"\d+", row["success_status"])
            path = row["path"].rstrip("/")  # a slash at the end means nothing
            found.append(Endpoint(row["method"], path, row["tier"], None if status is None else int(status[0])))
    return found


def served_tables(routes: Iterable[APIRoute]) -> str:
    """A table for each section, paths in the order of the routers."""
    by_path: dict[str, dict[str, str]] = {}
    for route in routes:
        by_path.setdefault(route.path, {}).update(dict.fromkeys(route.methods or (), _note(route)))
    lines: list[str] = []
    left = dict(by_path)
    for title, pattern in _SECTIONS:
        paths = [path for path in left if re.fullmatch(pattern, path)]
        lines += ["", f"### {title}", "", "| path | methods | notes |", "|---|---|---|"]
        lines += [_row(path, left.pop(path)) for path in paths]
    assert not left, f"no section of the page has {sorted(left)}"
    return "\n".join(lines[1:])


def _note(route: APIRoute) -> str:
    """What its function says, and its parameters."""
    said = [" ".join(route.description.split()).replace("|", "\\|")] if route.description else []
    query = [f"`{parameter.alias}`" for parameter in route.dependant.query_params]
    return "; ".join([*said, *([f"takes {', '.join(query)}"] if query else [])])


def _row(path: str, notes: dict[str, str]) -> str:
    methods = [method for method in METHODS if method in notes]
    said = [(method, notes[method]) for method in methods if notes[method]]
    text = said[0][1] if len(methods) == 1 and said else "; ".join(f"{method}: {note}" for method, note in said)
    return f"| `{path}` | {' '.join(methods)} | {text} |"


def unserved_list(endpoints: Sequence[Endpoint], routes: Iterable[APIRoute]) -> str:
    """By reason: what of Pulsar's API answers 501."""
    served = {(method, shape(route.path)) for route in routes for method in route.methods or ()}
    by_reason: dict[str, dict[str, list[str]]] = {}
    for endpoint in endpoints:
        if endpoint.call not in served and (reason := unserved(endpoint.path)) is not None:
            path = endpoint.path.replace(_TOPIC, "…/{topic}").replace("/admin/v2/namespaces/{tenant}/{namespace}", "…/{namespace}")
            by_reason.setdefault(reason, {}).setdefault(path, []).append(endpoint.method)
    lines = ["| why not | calls |", "|---|---|"]
    for reason, paths in by_reason.items():
        calls = (f"{' '.join(methods)} `{path}`".replace("|", "\\|") for path, methods in paths.items())
        lines.append(f"| {reason} | {', '.join(calls)} |")
    return "\n".join(lines)


def with_tables(page: str) -> str:
    """Return the page with its generated parts replaced."""
    found = routes()
    for name, text in (("served", served_tables(found)), ("unserved", unserved_list(endpoints(), found))):
        start, end = f"<!-- {name}: generated -->", f"<!-- /{name} -->"
        assert page.count(start) == page.count(end) == 1, f"the page has no {start} … {end}"
        before, rest = page.split(start)
        page = f"{before}{start}\n{text}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
