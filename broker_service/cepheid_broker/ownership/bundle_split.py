"""Split a bundle of this broker while its topics stay open.

    begin ──► one multi: division of the namespace, records of the parts instead of the bundle's, histories ──► states and division
              change in one step, so that each topic is always in a bundle that this broker owns

    /namespaces/T/N                {…, bundle_starts}        version that was read
    /bundle-histories/T/N/range    {epoch, split_at}         of the bundle: no broker acquires it any more
    /bundle-histories/T/N/part     {epoch}                   of each part
    /bundles/T/N/range ► /bundles/T/N/part                   the bundle's record is deleted, those of the parts are created

Rules
1. Only the owner splits, with the version of the history that its acquisition wrote. So only one of a split and a concurrent
   acquisition succeeds.
2. A write whose answer was lost counts as done if the namespace has the parts and their records are of this session.
3. A broker splits one bundle of a namespace at a time. Another broker that splits at the same time changes the version of the
   namespace's record, and this one reads it again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from cepheid_broker.errors import NamespaceNotFoundError
from cepheid_broker.ownership.bundle_divisions import BundleDivisions
from cepheid_broker.ownership.bundle_states import BundleStates, Phase, Tenure
from cepheid_broker.ownership.bundle_tenures import BundleTenures
from cepheid_broker.ownership.bundles import MAX_BUNDLES, Bundle, division_of, is_in, starts_of
from cepheid_broker.ownership.ownership import SplitRefusedError, bundle_not_ready
from cepheid_metadata import (
    BadVersionError,
    BundleHistory,
    BundleOwner,
    Found,
    KeyExistsError,
    MetadataError,
    MetadataStore,
    NamespaceRecord,
    NoSuchKeyError,
    Op,
    bundle_histories,
    bundle_owners,
    namespace_records,
)
from cepheid_metadata.upgrade import read_storage_format

log = logging.getLogger(__name__)

SPLITS_SINCE = 2
"""Storage format of the cluster from which bundles may be unequal ranges: older releases cannot read such namespaces."""
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class _Seen:
    """The records as read before one attempt to split."""

    namespace: Found[NamespaceRecord]
    owner: Found[BundleOwner] | None
    histories: list[Found[BundleHistory] | None]
    """History of each part, or None."""


async def check_may_split(store: MetadataStore) -> None:
    """Raise SplitRefusedError in a cluster whose upgrade is not finished. Raises MetadataError."""
    if (found := await read_storage_format(store)) < SPLITS_SINCE:
        message = f"the storage format of the cluster is {found}, and bundles are split from {SPLITS_SINCE} on: "
        raise SplitRefusedError(f"{message}start this release for all processes, then run `cepheid cluster finish-upgrade`")


def check_cuts(bundle: Bundle, starts: Sequence[int]) -> None:
    """Raise SplitRefusedError for hashes at which the bundle cannot be split."""
    outside = [start for start in starts if not bundle.first < start <= bundle.last]
    if not starts or outside:
        message = (
            f"bundle {bundle} has the hashes from {bundle.first} to {bundle.last}; it can be split at {bundle.first + 1} or later"
        )
        raise SplitRefusedError(f"{message}{f', not at {outside[0]}' if outside else ''}", bundle=str(bundle))


def divided(record: NamespaceRecord, bundle: Bundle, starts: Sequence[int]) -> NamespaceRecord:
    """Return the namespace's record with the bundle split at `starts`. Raises SplitRefusedError."""
    check_cuts(bundle, starts)
    division = division_of(record)
    if not is_in(bundle, division):
        raise SplitRefusedError(f"{bundle} is not a bundle of its namespace any more", bundle=str(bundle))
    all_starts = tuple(sorted({*starts_of(division), *starts}))
    if len(all_starts) > MAX_BUNDLES:
        message = f"namespace {bundle.namespace} would have {len(all_starts)} bundles, and {MAX_BUNDLES} are possible"
        raise SplitRefusedError(message, bundle=str(bundle))
    return record.replace(bundles=len(all_starts), bundle_starts=all_starts)


class BundleSplits:
    """Splits bundles of this broker in metadata and in its states."""

    def __init__(self, store: MetadataStore, tenures: BundleTenures, states: BundleStates, divisions: BundleDivisions) -> None:
        self._store = store
        self._tenures = tenures
        self._states = states
        self._divisions = divisions
        self._namespaces = namespace_records(store)
        self._owners = bundle_owners(store)
        self._histories = bundle_histories(store)

    def __repr__(self) -> str:
        return f"<BundleSplits of {self._tenures!r}>"

    async def split(self, bundle: Bundle, starts: Sequence[int], reason: str) -> list[Bundle]:
        """Split a bundle of this broker, as described at `Ownership.split`."""
        check_cuts(bundle, starts)
        try:
            await check_may_split(self._store)
        except MetadataError as error:
            raise bundle_not_ready(bundle, f"it cannot be split: {error}") from error
        starts = sorted(dict.fromkeys(starts))
        await self._divisions.wait_free(bundle.namespace)
        tenure = self._states.begin_split(bundle)
        if tenure is None:
            raise bundle_not_ready(bundle, "it is not served here, or is being moved")
        try:
            with self._divisions.held(bundle.namespace):
                parts = await self._write(tenure, starts)
        finally:
            self._states.on_kept(tenure)  # does nothing if it was split or lost
        facts = {"bundle": str(bundle), "parts": [part.bundle.range for part in parts], "reason": reason}
        log.info("bundle.split", extra={**facts, "broker": self._tenures.broker_id})
        return [part.bundle for part in parts]

    async def _write(self, tenure: Tenure, starts: Sequence[int]) -> list[Tenure]:
        bundle, names = tenure.bundle, tenure.bundle.parts(starts)
        problem: MetadataError | None = None
        for _ in range(_ATTEMPTS):
            try:
                seen = await self._look(bundle, names)
                if (found := await self._written(seen, names)) is not None:  # rule 2
                    return self._conclude(tenure, seen.namespace.record, found)
                if seen.owner is None or not self._states.is_own(seen.owner.record) or not self._states.holds(tenure):
                    raise bundle_not_ready(bundle, "it is not served here any more")
                record = divided(seen.namespace.record, bundle, starts)
                parts, ops = self._plan(tenure, names, seen, starts)
                put = self._namespaces.replace_op(_noun(bundle), record, seen.namespace.version)
                results = await self._store.multi([*ops, put])
            except (BadVersionError, NoSuchKeyError, KeyExistsError) as error:
                problem = error  # another broker changed the namespace or owns the bundle: read the records again
                continue
            except MetadataError as error:
                if problem is not None and type(error) is type(problem):
                    break  # the store is unavailable
                problem = error
                continue
            for part, version in zip(parts, results[1:], strict=False):
                part.history_version = version if isinstance(version, int) else 0
            return self._conclude(tenure, record, parts)
        raise bundle_not_ready(bundle, f"it could not be split: {problem}")

    async def _look(self, bundle: Bundle, names: Sequence[Bundle]) -> _Seen:
        """Read the records that a split depends on. Raises MetadataError, NamespaceNotFoundError."""
        namespace = await self._namespaces.get(_noun(bundle))
        if namespace is None:
            raise NamespaceNotFoundError(f"namespace {bundle.namespace} does not exist", namespace=str(bundle.namespace))
        histories = [await self._histories.get(part.noun) for part in names]
        return _Seen(namespace, await self._owners.get(bundle.noun), histories)

    async def _written(self, seen: _Seen, names: Sequence[Bundle]) -> list[Tenure] | None:
        """Return the tenures of the parts if they exist already. Raises MetadataError."""
        division = division_of(seen.namespace.record)
        if not all(is_in(part, division) for part in names):
            return None
        found: list[Tenure] = []
        for part, history in zip(names, seen.histories, strict=True):
            owner = await self._owners.get(part.noun)
            if owner is None or history is None or not self._states.is_own(owner.record):
                return None
            found.append(Tenure(part, Phase.OWNED, owner.record.epoch, history.version))
        return found

    def _plan(self, tenure: Tenure, names: Sequence[Bundle], seen: _Seen, starts: Sequence[int]) -> tuple[list[Tenure], list[Op]]:
        """Return the tenures of the parts and the writes: first the bundle's history, then those of the parts in order."""
        bundle, tenures = tenure.bundle, self._tenures
        parts: list[Tenure] = []
        histories: list[Op] = [
            self._histories.replace_op(
                bundle.noun, BundleHistory(epoch=tenure.epoch, split_at=tuple(starts)), tenure.history_version
            )
        ]
        owners: list[Op] = [self._owners.delete_op(bundle.noun, 0)]
        for part, before in zip(names, seen.histories, strict=True):
            epoch = 1 + max(tenure.epoch, 0 if before is None else before.record.epoch)
            history = BundleHistory(epoch=epoch)
            if before is None:
                histories.append(self._histories.create_op(part.noun, history))
            else:
                histories.append(self._histories.replace_op(part.noun, history, before.version))
            incarnation, addresses = self._states.incarnation, dict(tenures.addresses)
            owner = BundleOwner(broker_id=tenures.broker_id, incarnation=incarnation, epoch=epoch, addresses=addresses)
            owners.append(self._owners.create_op(part.noun, owner, ephemeral=True))
            parts.append(Tenure(part, Phase.OWNED, epoch))
        return parts, [*histories, *owners]

    def _conclude(self, tenure: Tenure, record: NamespaceRecord, parts: list[Tenure]) -> list[Tenure]:
        """Replace the bundle by its parts in one step, so that each topic is in a bundle of this broker at all times."""
        was_kept = self._states.on_split(tenure, parts)
        self._divisions.set_split(tenure.bundle.namespace, record)
        if not was_kept:
            raise bundle_not_ready(tenure.bundle, "this broker's session ended while it was split")
        self._tenures.follow_parts(parts)
        return parts


def _noun(bundle: Bundle) -> tuple[str, str]:
    return bundle.namespace.tenant, bundle.namespace.local_name
