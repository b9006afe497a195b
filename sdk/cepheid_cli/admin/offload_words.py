"""Conversion of the offload policy between the command line and the fields of Pulsar's API.

    s3://bucket/prefix,after-size=1GB,after-age=1d,keep=1h,read-from=bookies
    └─ destination ─┘   └─ what is offloaded ─┘ └─ and then deleted from bookies
Every part may be omitted; that of the namespace or of the broker then applies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from cepheid_cli.admin.units import BadValueError, duration_s, size_bytes

_OFF = "off"
_FORM = "write s3://bucket/prefix,after-size=1GB,after-age=1d,keep=1h"
_DRIVERS = {"s3": "aws-s3", "gs": "google-cloud-storage", "abfs": "azureblob", "file": "filesystem"}
_SCHEMES = {driver: scheme for scheme, driver in _DRIVERS.items()}
_PREFIXES = ("managedLedgerOffload", "s3ManagedLedgerOffload", "gcsManagedLedgerOffload")
_READ_FROM = {"objects": "tiered-storage-first", "bookies": "bookkeeper-first"}


def _threshold(read: Callable[[str], int]) -> Callable[[str], int]:
    return lambda text: -1 if text == _OFF else read(text)


def _keep(text: str) -> int:
    seconds = duration_s(text)
    if seconds < 0:
        raise BadValueError("the time until bookies delete offloaded data must be limited, for example 1h or 52w")
    return seconds * 1000


def _read_from(text: str) -> str:
    if text not in _READ_FROM:
        raise BadValueError(f"{text!r} is neither bookies nor objects")
    return _READ_FROM[text]


_OPTIONS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "after-size": ("managedLedgerOffloadThresholdInBytes", _threshold(size_bytes)),
    "after-age": ("managedLedgerOffloadThresholdInSeconds", _threshold(duration_s)),
    "keep": ("managedLedgerOffloadDeletionLagInMillis", _keep),
    "read-from": ("managedLedgerOffloadedReadPriority", _read_from),
}


def offload_body(text: str) -> dict[str, Any]:
    """Return the body of `offloadPolicies`. Raises BadValueError, which says what is wrong and what to write."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        part = part.strip()
        if not part:
            raise BadValueError(f"a part of the value is empty: {_FORM}")
        if "://" in part.partition("=")[0] or not part.partition("=")[1]:
            if "managedLedgerOffloadDriver" in found:
                raise BadValueError(f"{part!r} is a second destination: name one, and options as NAME=VALUE")
            found |= _store(part)
            continue
        name, _, value = part.partition("=")
        field, read = _option(name.strip())
        if field in found:
            raise BadValueError(f"{name} is given twice: keep one")
        try:
            found[field] = read(value.strip())
        except BadValueError as error:
            raise BadValueError(f"{name}: {error}") from None
    return found


def _option(name: str) -> tuple[str, Callable[[str], Any]]:
    if name in _OPTIONS:
        return _OPTIONS[name]
    near = get_close_matches(name, _OPTIONS, 1)
    did_you_mean = f"; did you mean {near[0]}?" if near else ""
    raise BadValueError(f"unknown option {name!r}: {', '.join(_OPTIONS)} are possible{did_you_mean}")


def _store(text: str) -> dict[str, Any]:
    from cepheid_tiered import StoreLocation, StoreLocationError  # no other command needs its package

    try:
        url = StoreLocation.parse(text)
    except StoreLocationError as error:
        raise BadValueError(str(error)) from None
    found: dict[str, Any] = {"managedLedgerOffloadDriver": _DRIVERS[url.scheme]}
    if url.scheme == "file":
        return {**found, "fileSystemURI": str(url)}
    found["managedLedgerOffloadBucket"] = url.bucket
    if url.region is not None:
        found["managedLedgerOffloadRegion"] = url.region
    if url.endpoint is not None:
        found["managedLedgerOffloadServiceEndpoint"] = url.endpoint
    if url.prefix:
        found["managedLedgerExtraConfigurations"] = {"prefix": url.prefix}
    return found


def shown_offload(policy: Mapping[str, Any]) -> str:
    """Return the value for `set` of an OffloadPolicies of the API."""
    parts = [] if (url := _url_of(policy)) is None else [url]
    for name, unit in (("after-size", _size_text), ("after-age", _time_text)):
        value = policy.get(_OPTIONS[name][0])
        if value is not None:
            parts.append(f"{name}={_OFF if value < 0 else unit(value)}")
    keep_ms = policy.get("managedLedgerOffloadDeletionLagInMillis")
    if keep_ms is not None:
        parts.append(f"keep={_time_text(keep_ms // 1000)}")
    priority = policy.get("managedLedgerOffloadedReadPriority")
    if priority is not None:
        parts.append(f"read-from={next(ours for ours, theirs in _READ_FROM.items() if theirs == priority)}")
    return ",".join(parts)


def _url_of(policy: Mapping[str, Any]) -> str | None:
    from cepheid_tiered import StoreLocation

    driver = policy.get("managedLedgerOffloadDriver")
    if driver is None:
        return None
    scheme = _SCHEMES[driver]
    if scheme == "file":
        return str(policy["fileSystemURI"])
    bucket, region, endpoint = (_of_store(policy, field) for field in ("Bucket", "Region", "ServiceEndpoint"))
    prefix = policy.get("managedLedgerExtraConfigurations", {}).get("prefix", "")
    return str(StoreLocation(scheme, bucket or "", prefix, region, endpoint))


def _of_store(policy: Mapping[str, Any], field: str) -> str | None:
    """Return a field of the store, under its neutral name or that of a driver."""
    return next((value for name in _PREFIXES if (value := policy.get(f"{name}{field}"))), None)


def _size_text(size: int) -> str:
    for unit, bytes_of in (("TB", 1 << 40), ("GB", 1 << 30), ("MB", 1 << 20), ("KB", 1 << 10)):
        if size and size % bytes_of == 0:
            return f"{size // bytes_of}{unit}"
    return str(size)


def _time_text(seconds: int) -> str:
    for unit, seconds_of in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds and seconds % seconds_of == 0:
            return f"{seconds // seconds_of}{unit}"
    return f"{seconds}s"
