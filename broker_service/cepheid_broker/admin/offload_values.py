"""Pulsar's OffloadPolicies and our `OffloadPolicy`: a driver with its bucket, region and endpoint there, one URL here.

    aws-s3, S3 ⇄ s3://        google-cloud-storage ⇄ gs://        azureblob ⇄ abfs://        filesystem ⇄ file://
A field that is absent or null says nothing, and the level above decides; -1 switches a threshold off. What cannot be done as it is
asked for is refused, above all credentials in a policy: policies are shown to everybody who may read them.
Field names are those of docs/reference/shapes.md §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from cepheid_broker.admin.errors import NotServedError, PreconditionError
from cepheid_broker.admin.policy_values import Long, number
from cepheid_broker.policies import TopicPolicies
from cepheid_metadata import OffloadPolicy
from cepheid_tiered import StoreLocation, StoreLocationError
from cepheid_tiered.requirements import missing_requirements

if TYPE_CHECKING:
    from cepheid_broker.admin.context import AdminContext

MAX_MS = 2**53  # 285,000 years: as seconds, and as milliseconds in JSON, an exact number everywhere

_SCHEMES = {"aws-s3": "s3", "s3": "s3", "google-cloud-storage": "gs", "azureblob": "abfs", "filesystem": "file"}
_DRIVERS = {"s3": "aws-s3", "gs": "google-cloud-storage", "abfs": "azureblob", "file": "filesystem"}
_OWN_FIELDS = {"s3": "s3ManagedLedgerOffload", "gs": "gcsManagedLedgerOffload"}
"""Drivers that have fields of their own besides the neutral ones."""
_READ_FROM = {"tiered-storage-first": "objects", "bookkeeper-first": "bookies"}
_READ_PRIORITY = {ours: theirs for theirs, ours in _READ_FROM.items()}

_CREDENTIALS = (
    "s3ManagedLedgerOffloadCredentialId",
    "s3ManagedLedgerOffloadCredentialSecret",
    "s3ManagedLedgerOffloadRole",
    "gcsManagedLedgerOffloadServiceAccountKeyFile",
)
_HOLD_ANYWAY: Mapping[str, tuple[Any, ...]] = {
    "offloadersDirectory": ("./offloaders",),
    "managedLedgerOffloadMaxThreads": (2,),
    "managedLedgerOffloadReadThreads": (2,),
    "managedLedgerOffloadPrefetchRounds": (1,),
    "s3ManagedLedgerOffloadRoleSessionName": ("pulsar-s3-offload",),
    **{f"{name}MaxBlockSizeInBytes": (64 << 20, 128 << 20) for name in ("managedLedgerOffload", *_OWN_FIELDS.values())},
    **{f"{name}ReadBufferSizeInBytes": (1 << 20,) for name in ("managedLedgerOffload", *_OWN_FIELDS.values())},
}
"""Pulsar's defaults for options that do not exist here. Its clients send them along, and they have no visible effect."""


class OffloadPoliciesBody(BaseModel):
    """The fields that mean something here. Others are extra members, refused unless they are empty or Pulsar's default."""

    model_config = ConfigDict(extra="allow")

    managedLedgerOffloadDriver: str | None = None
    managedLedgerOffloadThresholdInBytes: Long | None = None
    managedLedgerOffloadThresholdInSeconds: Long | None = None
    managedLedgerOffloadDeletionLagInMillis: Long | None = None
    managedLedgerOffloadedReadPriority: str | None = None
    managedLedgerOffloadBucket: str | None = None
    managedLedgerOffloadRegion: str | None = None
    managedLedgerOffloadServiceEndpoint: str | None = None
    s3ManagedLedgerOffloadBucket: str | None = None
    s3ManagedLedgerOffloadRegion: str | None = None
    s3ManagedLedgerOffloadServiceEndpoint: str | None = None
    gcsManagedLedgerOffloadBucket: str | None = None
    gcsManagedLedgerOffloadRegion: str | None = None
    fileSystemURI: str | None = None
    managedLedgerExtraConfigurations: dict[str, str] | None = None


def offload_policy(body: OffloadPoliciesBody) -> OffloadPolicy:
    """Raises PreconditionError, NotServedError."""
    _refuse_what_is_not_done(body.model_extra or {})
    policy = OffloadPolicy(
        url=_url(body),
        after_bytes=threshold(body.managedLedgerOffloadThresholdInBytes),
        after_s=threshold(body.managedLedgerOffloadThresholdInSeconds, most=MAX_MS // 1000),
        keep_s=keep_s(body.managedLedgerOffloadDeletionLagInMillis),
        read_from=_read_from(body.managedLedgerOffloadedReadPriority),
    )
    if is_empty(policy):
        raise PreconditionError(f"The offload policy is empty: managedLedgerOffloadDriver is one of {', '.join(_DRIVERS.values())}")
    return policy


def offload_policy_json(policy: OffloadPolicy) -> dict[str, Any]:
    """What is not set is left out, as Pulsar does it."""
    found: dict[str, Any] = {
        **({} if policy.url is None else _store_json(StoreLocation.parse(policy.url))),
        "managedLedgerOffloadThresholdInBytes": policy.after_bytes,
        "managedLedgerOffloadThresholdInSeconds": policy.after_s,
        "managedLedgerOffloadDeletionLagInMillis": None if policy.keep_s is None else policy.keep_s * 1000,
        "managedLedgerOffloadedReadPriority": None if policy.read_from is None else _READ_PRIORITY[policy.read_from],
    }
    return {name: value for name, value in found.items() if value is not None}


def offload_in_force(policies: TopicPolicies) -> dict[str, Any]:
    found = policies.offload
    return offload_policy_json(
        OffloadPolicy(
            url=found.url,
            after_bytes=found.after_bytes,
            after_s=found.after_ms if found.after_ms < 0 else found.after_ms // 1000,
            keep_s=found.keep_ms // 1000,
            read_from="objects" if found.reads_objects else "bookies",
        )
    )


async def check_offload_possible(context: AdminContext, policy: OffloadPolicy) -> None:
    """Raises PreconditionError where this broker could not carry the policy out."""
    if policy.url is not None and (missing := missing_requirements()) is not None:
        raise PreconditionError(f"Nothing can be offloaded: {missing}")
    if policy.url is not None and policy.url.startswith("file:"):
        await _make_directory(context, policy.url)


async def _make_directory(context: AdminContext, url: str) -> None:
    """Uploads do not make the directory of a policy: its disk might not be mounted. If it cannot be made, they say why."""
    from cepheid_tiered.file_objects import make_base

    worker = context.broker.ports.new_worker("make-directory", 1)
    try:
        with suppress(OSError):
            await worker.run(lambda: make_base(url))
    finally:
        await worker.aclose()


def threshold(value: int | None, *, most: float = float("inf")) -> int | None:
    return None if value is None else number(value, least=-1, most=most)


def keep_s(value_ms: int | None) -> int | None:
    if value_ms is None:
        return None
    if number(value_ms, most=MAX_MS) % 1000:
        raise PreconditionError(f"{value_ms} ms: the time until offloaded ledgers are deleted from bookies is in whole seconds")
    return value_ms // 1000


def is_empty(policy: OffloadPolicy) -> bool:
    return all(value is None for value in dict(policy).values())


def _url(body: OffloadPoliciesBody) -> str | None:
    extra = dict(body.managedLedgerExtraConfigurations or {})
    prefix = extra.pop("prefix", "").strip("/")
    if extra:
        raise PreconditionError(f"managedLedgerExtraConfigurations: {_cut(min(extra))} is not known; prefix is")
    driver = body.managedLedgerOffloadDriver
    if not driver:
        named = [name for name, value in dict(body).items() if value and name.endswith(("Bucket", "Region", "Endpoint", "URI"))]
        if named or prefix:
            raise PreconditionError(
                f"{(named or ['prefix'])[0]} is set without managedLedgerOffloadDriver: {', '.join(_DRIVERS.values())}"
            )
        return None
    scheme = _SCHEMES.get(driver.lower())
    if scheme is None:
        raise PreconditionError(f"{_cut(driver)} is not a driver that this broker has: {', '.join(_DRIVERS.values())}")
    _refuse_other_drivers(body, scheme)
    if scheme == "file":
        if not (body.fileSystemURI or "").startswith("file:"):
            raise PreconditionError("The driver filesystem needs fileSystemURI=file:///absolute/path; hdfs:// is not served")
        place = f"file:///{body.fileSystemURI[len('file:') :].lstrip('/')}" if body.fileSystemURI else ""
        return _parsed(f"{place}/{prefix}" if prefix else place)
    bucket = _one_of_both(body, scheme, "Bucket")
    if not bucket:
        raise PreconditionError(f"The driver {driver} needs a bucket")
    options = {"region": _one_of_both(body, scheme, "Region"), "endpoint": _one_of_both(body, scheme, "ServiceEndpoint")}
    store = StoreLocation(scheme, bucket, prefix, **{name: value for name, value in options.items() if value})
    return _parsed(str(store))


def _parsed(text: str) -> str:
    try:
        return str(StoreLocation.parse(text))
    except StoreLocationError as error:
        raise PreconditionError(str(error)) from None


def _one_of_both(body: OffloadPoliciesBody, scheme: str, field: str) -> str | None:
    """The driver's own field or the neutral one. Clients may send both, and then they must agree."""
    neutral = f"managedLedgerOffload{field}"
    names = [neutral, f"{_OWN_FIELDS[scheme]}{field}"] if scheme in _OWN_FIELDS else [neutral]
    found = {value: name for name in names if (value := getattr(body, name, None))}
    if len(found) > 1:
        raise PreconditionError(f"{' and '.join(found.values())} differ: {' and '.join(map(_cut, found))}")
    return next(iter(found), None)


def _refuse_other_drivers(body: OffloadPoliciesBody, scheme: str) -> None:
    own = _OWN_FIELDS.get(scheme)
    for name, value in dict(body).items():
        is_of_driver = name.startswith((*_OWN_FIELDS.values(), "fileSystem"))
        is_own = (own is not None and name.startswith(own)) or (scheme == "file" and name == "fileSystemURI")
        if value and is_of_driver and not is_own:
            raise PreconditionError(f"{name} does not belong to the driver {_DRIVERS[scheme]}")


def _refuse_what_is_not_done(extra: Mapping[str, Any]) -> None:
    for name, value in extra.items():
        if not value or value in _HOLD_ANYWAY.get(name, ()):
            continue
        if name in _CREDENTIALS:
            raise PreconditionError(
                f"{name} is refused: a policy is stored and shown in the clear. Brokers read credentials from their environment "
                "(docs/tiered-storage.md)"
            )
        raise NotServedError(f"The offload policy's {_cut(name)} is not served: leave it out")


def _read_from(priority: str | None) -> Any:
    if not priority:
        return None
    found = _READ_FROM.get(priority.lower().replace("_", "-"))
    if found is None:
        raise PreconditionError(f"managedLedgerOffloadedReadPriority is {' or '.join(_READ_FROM)}, got {_cut(priority)}")
    return found


def _store_json(store: StoreLocation) -> dict[str, Any]:
    found: dict[str, Any] = {"managedLedgerOffloadDriver": _DRIVERS[store.scheme]}
    if store.scheme == "file":
        return {**found, "fileSystemURI": str(store)}
    own = _OWN_FIELDS.get(store.scheme, "managedLedgerOffload")
    found[f"{own}Bucket"] = store.bucket
    if store.region is not None:
        found[f"{own}Region"] = store.region
    if store.endpoint is not None:
        has_own = store.scheme == "s3"
        found[f"{own if has_own else 'managedLedgerOffload'}ServiceEndpoint"] = store.endpoint
    if store.prefix:
        found["managedLedgerExtraConfigurations"] = {"prefix": store.prefix}
    return found


def _cut(text: str) -> str:
    return repr(text[:100])
