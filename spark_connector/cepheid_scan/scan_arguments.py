"""Checks the arguments of `scan` and converts them: callers may pass numpy's numbers, and mistakes.

All functions raise BadOptionError, which names the argument: a silent mistake would return no rows, or all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any, SupportsIndex

from cepheid_decode.counters import ScanCounters
from cepheid_decode.errors import BadOptionError
from cepheid_decode.scan_request import PlanSource, ReadSettings, StorageAccess
from cepheid_ports import CepheidError
from cepheid_scan.edge_words import full_name
from cepheid_security import ClientTls
from cepheid_security.client_environment import ClientSecrets, own_secrets

_WHOLE = {"read_attempts": 1, "chunk_bytes": 1, "decode_bytes": 1, "chunk_lookback": 0}  # settings, and the minimum of each


def plan_source(
    service_url: Any,
    admin_url: Any,
    metadata: Any,
    token: Any,
    retry_s: Any,
    tls: ClientTls | None = None,
    password: Any = None,
) -> PlanSource:
    """Return the source of plans. Without `token` and `password` the environment is used (client_environment.py)."""
    urls = {"service_url": service_url, "admin_url": admin_url, "metadata": metadata}
    for name, url in urls.items():
        _text(name, url)
    if not any(urls.values()):
        raise BadOptionError("no cluster is given: set service_url (pulsar://host:6650), admin_url or metadata")
    secrets = _given_secrets(token, password) or secrets_of_environment()
    return PlanSource(**urls, secrets=secrets, retry_s=_number("retry_s", retry_s, at_least=0), tls=tls)


def _given_secrets(token: Any, password: Any) -> ClientSecrets | None:
    """Return the given secrets, None if there are none. Values are never shown."""
    if token and password is not None:
        raise BadOptionError("give token or password, not both")
    if token is not None and not (isinstance(token, str | Path) or callable(token)):
        raise BadOptionError(
            f"token must be text, the Path of its file, or a function that returns it, got type {type(token).__name__}"
        )
    if password is None:
        return ClientSecrets(token) if token else None
    if not (isinstance(password, tuple) and len(password) == 2 and all(isinstance(each, str) for each in password)):
        raise BadOptionError(f"password must be (user, password), two texts, got type {type(password).__name__}")
    if ":" in password[0]:
        raise BadOptionError("a user name must not contain a colon")
    return ClientSecrets(password=password)


def secrets_of_environment() -> ClientSecrets:
    """Return the secrets of the environment, which may be none. Raises BadOptionError."""
    try:
        return own_secrets()
    except CepheidError as error:
        raise BadOptionError(str(error)) from None


def tls_files(ca_file: Any, certificate_file: Any, key_file: Any) -> ClientTls | None:
    """Return the files of TLS; None: none is given, those of the environment are used. Raises BadOptionError.

    CEPHEID_TLS_CRL applies in both cases.
    """
    names = ("tls_ca_file", "tls_certificate_file", "tls_key_file")
    files = [_text(name, path) for name, path in zip(names, (ca_file, certificate_file, key_file), strict=True)]
    if (certificate_file is None) != (key_file is None):
        raise BadOptionError("tls_certificate_file and tls_key_file must be given together")
    crl = ClientTls.from_environment().crl if ca_file else None
    return ClientTls(files[0], files[1], files[2], crl) if any(files) else None


def topic_names(given: str | Sequence[str]) -> tuple[str, ...]:
    """Return the full names without duplicates."""
    names = _texts("topics", [given] if isinstance(given, str) else given, "give one, or several")
    return tuple(dict.fromkeys(map(full_name, names)))


def chosen_columns(given: Sequence[str]) -> tuple[str, ...]:
    columns = _texts("columns", given, "without the argument rows have those of their mode")
    if twice := sorted(name for name in set(columns) if columns.count(name) > 1):
        raise BadOptionError(f"columns names {twice[0]} twice", columns=twice)
    return columns


def chosen_keys(given: Iterable[str]) -> frozenset[str]:
    return frozenset(_texts("keys", [given] if isinstance(given, str) else given, "without the argument all are read"))


def chosen_partitions(given: Iterable[SupportsIndex]) -> frozenset[int]:
    chosen = []
    for each in _listed(given, "partitions"):
        if (number := _index(each)) is None:
            raise BadOptionError(f"partitions must be whole numbers such as [0, 3], got {each!r}")
        chosen.append(number)
    if not chosen or min(chosen) < 0:
        said = f"{min(chosen)} is not one" if chosen else "none is given"
        raise BadOptionError(f"which partitions? {said}: they are numbered from 0, and without the argument all are read")
    return frozenset(chosen)


def checked_settings(given: Any) -> ReadSettings:
    settings = ReadSettings() if given is None else given
    if not isinstance(settings, ReadSettings):
        raise BadOptionError(f"settings must be ReadSettings, got {settings!r}")
    whole: dict[str, Any] = {
        name: whole_number(f"settings.{name}", getattr(settings, name), at_least=least) for name, least in _WHOLE.items()
    }
    return replace(
        settings,
        rack=_text("settings.rack", settings.rack),
        read_timeout_s=_number("settings.read_timeout_s", settings.read_timeout_s, at_least=0.001),
        unreachable_s=_number("settings.unreachable_s", settings.unreachable_s, at_least=0),
        verify_checksum=true_or_false("settings.verify_checksum", settings.verify_checksum),
        prefer_bookies=true_or_false("settings.prefer_bookies", settings.prefer_bookies),
        **whole,
    )


def checked_storage(given: Any) -> StorageAccess:
    """Return the storage access. The value is never shown: it may be a secret."""
    storage = StorageAccess() if given is None else given
    if not isinstance(storage, StorageAccess):
        raise BadOptionError(f"storage is StorageAccess(access_key=…, secret_key=…, …), not a {type(storage).__name__}")
    for name in ("access_key", "secret_key", "session_token", "endpoint", "region"):
        if not isinstance(getattr(storage, name), str | None):
            raise BadOptionError(f"storage.{name} must be text")
    if (storage.access_key is None) != (storage.secret_key is None):
        raise BadOptionError("storage.access_key and storage.secret_key must be given together")
    return storage


def checked_counters(given: Any) -> ScanCounters:
    counters = ScanCounters() if given is None else given
    if not isinstance(counters, ScanCounters):
        raise BadOptionError(f"counters must be ScanCounters, got {counters!r}")
    return counters


def true_or_false(name: str, value: Any) -> bool:
    if not isinstance(value, bool) and type(value).__name__ not in ("bool", "bool_"):  # numpy's, by its two names
        raise BadOptionError(f"{name} must be True or False, got {value!r}", value=repr(value))
    return bool(value)


def whole_number(name: str, value: Any, *, at_least: int) -> int:
    if (number := _index(value)) is None:
        raise BadOptionError(f"{name} must be a whole number, got {value!r}", value=repr(value))
    if number < at_least:
        raise BadOptionError(f"{name} must be at least {at_least}, got {number}", value=number)
    return number


def one_of(kind: Any, word: Any, option: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise BadOptionError(f"{option} '{word}': there is {', '.join(member.value for member in kind)}", value=word) from None


def _number(name: str, value: Any, *, at_least: float) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise BadOptionError(f"{name} must be a number, got {value!r}", value=repr(value))
    try:
        number = float(value)
    except OverflowError:
        raise BadOptionError(f"{name} is too large") from None
    if not number >= at_least:  # also refuses NaN
        raise BadOptionError(f"{name} must be at least {at_least}, got {value}", value=number)
    return number


def _index(value: Any) -> int | None:
    """Return any whole number, also numpy's, as int; None: it is not one."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _text(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise BadOptionError(f"{name} must be text, got {value!r}")
    return value


def _texts(what: str, given: Any, advice: str) -> tuple[str, ...]:
    """Return a list of names that must not be empty. `advice`: what to do if it is."""
    texts = _listed(given, what)
    if not texts:
        raise BadOptionError(f"the list of {what} is empty: {advice}")
    if wrong := [each for each in texts if not isinstance(each, str)]:
        raise BadOptionError(f"{what} must be text, got {wrong[0]!r}")
    return tuple(texts)


def _listed(given: Any, what: str) -> list[Any]:
    try:
        if not isinstance(given, str | bytes):
            return list(given)
    except TypeError:
        pass
    raise BadOptionError(f"{what} must be a list, got {given!r}")
