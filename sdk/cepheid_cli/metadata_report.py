"""Compares bookies with metadata: what a restored backup does not know, and what bookies lost since it was created.

    ids of each bookie ──first──►┐              ┌─► unknown: held, but not in metadata
                                 ├──► compare ──┼─► missing: in metadata, but held by no bookie
    records of metadata ─second─►┘              └─► moved: held by other bookies than metadata names

Bookies are asked first: what a bookie holds was in metadata earlier.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from itertools import zip_longest
from typing import Any

from cepheid.errors import Error
from cepheid_cli.admin.units import counted
from cepheid_cli.client_security import connect_admin
from cepheid_cli.ledger_source import LedgerSource
from cepheid_ledger.striping import runs_at
from cepheid_security import ClientTls

_TIMEOUT_S = 30.0


@dataclass(slots=True)
class MetadataReport:
    """Differences between bookies and metadata: ledger ids, each with the bookies that hold it."""

    unknown: dict[int, list[str]] = field(default_factory=dict)
    """Ledgers held by bookies that metadata has neither as living nor as deleted."""
    missing: dict[int, list[str]] = field(default_factory=dict)
    """Closed ledgers with entries that no bookie holds, with the bookies that their record names."""
    moved: dict[int, list[str]] = field(default_factory=dict)
    """Closed ledgers held by a bookie that their record does not name, while one that it names lacks them; with the former.

    Repair copied them after the backup. Such a copy is collected as surplus unless a record names it.
    """
    silent: dict[str, str] = field(default_factory=dict)
    """Bookies that did not answer, with the reason."""


async def make_report(source: LedgerSource, admin_url: str | None) -> MetadataReport:
    """Ask all bookies and metadata. `admin_url`: of a broker, which answers for bookies in its own process."""
    held: dict[str, list[int]] = {}
    silent: dict[str, str] = {}
    for bookie in await source.bookies():
        name = bookie["bookie_id"]
        try:
            held[name] = ledgers_of(name, http_url_of(bookie["addresses"]), admin_url)
        except (OSError, HTTPException, ValueError, KeyError, Error) as error:
            silent[name] = f"it is {bookie['state']}" if bookie["state"] == "down" else str(error)
    living, known = await _records(source, deleted=False)
    deleted, damaged = await _records(source, deleted=True)
    return compare(held, silent, living, [*known, *damaged, *(record["ledger_id"] for record in deleted)])


def compare(
    held: Mapping[str, Sequence[int]], silent: Mapping[str, str], living: Iterable[Mapping[str, Any]], others: Iterable[int]
) -> MetadataReport:
    """Return the differences. `others`: ids of ledgers that are deleted, or whose record cannot be read.

    While a bookie that a record names does not answer, its ledger is not `missing`.
    """
    holders: dict[int, list[str]] = {}
    for bookie, ids in held.items():
        for ledger_id in ids:
            holders.setdefault(ledger_id, []).append(bookie)
    report = MetadataReport(silent=dict(silent))
    for record in living:
        found = holders.pop(record["ledger_id"], [])
        named = _named(record)
        has_entries = record["state"] == "CLOSED" and record["last_entry_id"] >= 0
        if has_entries and not found and named <= held.keys():
            report.missing[record["ledger_id"]] = sorted(named)
        elif has_entries and not named <= set(found) and (others_hold := [one for one in found if one not in named]):
            report.moved[record["ledger_id"]] = others_hold
    for ledger_id in others:
        holders.pop(ledger_id, None)
    report.unknown = dict(sorted(holders.items()))
    return report


def _named(record: Mapping[str, Any]) -> set[str]:
    """Return the bookies that should hold entries of a ledger. The last fragment of a closed one may be empty.

    Of a striped ledger's short fragment, a bookie may get no entry.
    """
    named: set[str] = set()
    fragments, quorum = record["fragments"], record["write_quorum"]
    for fragment, following in zip_longest(fragments, fragments[1:]):
        ensemble, first = fragment["ensemble"], fragment["first_entry_id"]
        last = following["first_entry_id"] - 1 if following else record["last_entry_id"]
        if last is None:
            named.update(ensemble)
        else:
            last = min(last, first + len(ensemble) - 1)  # with more entries, each bookie has some
            named.update(
                bookie for position, bookie in enumerate(ensemble) if runs_at(position, first, last, len(ensemble), quorum)
            )
    return named


def report_lines(report: MetadataReport) -> list[str]:
    """Return the output of `cepheid metadata report`."""
    lines = [f"ledger {ledger_id}: held by {', '.join(bookies)}, not in metadata" for ledger_id, bookies in report.unknown.items()]
    for ledger_id, bookies in report.missing.items():
        lines.append(f"ledger {ledger_id}: in metadata, but neither {' nor '.join(bookies)} nor another bookie holds it")
    for ledger_id, bookies in report.moved.items():
        lines.append(f"ledger {ledger_id}: held by {', '.join(bookies)}, which metadata does not name for it")
    lines += [f"{bookie} did not say what it holds: {reason}" for bookie, reason in report.silent.items()]
    unknown, missing, moved = (counted(len(one), "ledger") for one in (report.unknown, report.missing, report.moved))
    silent = counted(len(report.silent), "bookie")
    return [*lines, f"{unknown} not in metadata, {missing} without a copy, {moved} at other bookies, {silent} without an answer"]


async def _records(source: LedgerSource, *, deleted: bool) -> tuple[list[dict[str, Any]], list[int]]:
    """Return the records of ledgers, and the ids of those that cannot be read."""
    records: list[dict[str, Any]] = []
    damaged: list[int] = []
    above: int | None = -1
    while above is not None:
        page = await source.page(above, deleted=deleted)
        records += [view["ledger"] for view in page["ledgers"]]
        damaged += [one["ledger_id"] for one in page["damaged"]]
        above = page["next"]
    return records, damaged


def ledgers_of(bookie: str, url: str | None, admin_url: str | None) -> list[int]:
    """Return the ids of the ledgers that a bookie holds. Raises OSError, HTTPException, ValueError, and errors of the admin API."""
    ids: list[int] = []
    above: int | None = -1
    while above is not None:
        if url is not None:
            page = _page(url, above)
        elif admin_url is not None:
            page = connect_admin(admin_url).bookies.ledgers(bookie, above=above)
        else:
            raise ValueError("it has no HTTP address")
        ids += page["ledgers"]
        above = page["next"]
    return ids


def http_url_of(addresses: Mapping[str, str]) -> str | None:
    """Return the registered address of a bookie's health page."""
    return next((f"{scheme}://{addresses[scheme]}" for scheme in ("https", "http") if scheme in addresses), None)


def _page(url: str, above: int) -> dict[str, Any]:
    scheme, _, address = url.partition("://")
    if scheme == "https":  # with a certificate: the list of ledgers is not public
        connection: HTTPConnection = HTTPSConnection(address, timeout=_TIMEOUT_S, context=ClientTls.from_environment().context())
    else:
        connection = HTTPConnection(address, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", f"/ledgers?above={above}")
        response = connection.getresponse()
        content = response.read()
    finally:
        connection.close()
    if response.status != 200:
        raise ValueError(content.decode(errors="replace").strip()[:200])
    page: dict[str, Any] = json.loads(content)
    return page
