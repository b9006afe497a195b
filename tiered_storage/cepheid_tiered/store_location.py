"""The URL of an object store as operators write it in a policy. Every part is checked before it is stored or used.

    s3://bucket/prefix?region=eu-west-1&endpoint=https://minio:9000        gs://bucket/prefix        abfs://container/prefix
    file:///absolute/path                                                  abfs://container@account.dfs.core.windows.net/prefix

It names a place and how to reach it, never credentials: these come from the environment of the process that connects.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from urllib.parse import parse_qsl, urlencode, urlsplit

from cepheid_ports import CepheidError

SCHEMES = ("s3", "gs", "abfs", "file")
OPTIONS = ("region", "endpoint")
MAX_URL_CHARS = 800  # an object's key adds the topic's name to it, and S3 allows 1,024 bytes

_OTHER_NAMES = {
    "s3a": "s3",
    "s3n": "s3",
    "gcs": "gs",
    "az": "abfs",
    "azure": "abfs",
    "abfss": "abfs",
    "wasb": "abfs",
    "wasbs": "abfs",
}
_SECRET = re.compile(
    r"secret|password|passwd|token|credential|access_?key|account_?key|api_?key|signature|\bsas\b|\bsig\b", re.IGNORECASE
)
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_ACCOUNT = re.compile(r"[a-z0-9-]{3,63}@[a-z0-9]{3,24}\.(dfs|blob)\.core\.windows\.net")
_REGION = re.compile(r"[a-zA-Z0-9-]{1,64}")
_FORM = "write s3://bucket/prefix, gs://bucket/prefix, abfs://container/prefix or file:///path"
_ENVIRONMENT = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or the role of the machine",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the account of the machine",
    "abfs": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the identity of the machine",
    "file": "the rights of its user",
}


class StoreLocationError(CepheidError):
    """The text is not the URL of a usable object store. The message never repeats what may be a secret."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """A place in an object store. `prefix` has no leading or trailing slash; for `file` it is the path without its first slash."""

    scheme: str
    bucket: str
    prefix: str = ""
    region: str | None = None
    endpoint: str | None = None

    def __str__(self) -> str:
        place = f"{self.scheme}://{self.bucket}/{self.prefix}" if self.prefix else f"{self.scheme}://{self.bucket}"
        options = {name: value for name in OPTIONS if (value := getattr(self, name)) is not None}
        return f"{place}?{urlencode(options, safe=':/')}" if options else place

    @classmethod
    def parse(cls, text: str) -> StoreLocation:
        """Parse a URL. Raises StoreLocationError with the problem and what to write instead."""
        if len(text) > MAX_URL_CHARS:
            raise StoreLocationError(
                f"the URL has {len(text)} characters, at most {MAX_URL_CHARS} are possible: shorten the prefix"
            )
        scheme, separator, _ = text.partition("://")
        if not separator:
            raise StoreLocationError(f"{_shown(text)} is not the URL of an object store: {_FORM}")
        if scheme not in SCHEMES:
            raise StoreLocationError(_unknown_scheme(scheme))
        try:
            parts = urlsplit(text)
        except ValueError as error:
            raise StoreLocationError(f"the {scheme} URL cannot be read ({error}): {_FORM}") from None
        if "@" in parts.netloc and not (scheme == "abfs" and _ACCOUNT.fullmatch(parts.netloc)):
            raise StoreLocationError(_user_in_url(scheme))
        options = _options(scheme, parts.query)
        if parts.fragment or text.endswith("#"):
            raise StoreLocationError("the URL has a fragment (#…): leave it out, or choose a prefix without #")
        prefix = _prefix(parts.path)
        if scheme == "file":
            return _file(parts.netloc, prefix, options)
        return cls(scheme, _bucket(scheme, parts.netloc), prefix, options.get("region"), options.get("endpoint"))


def _file(host: str, prefix: str, options: dict[str, str]) -> StoreLocation:
    if host:
        raise StoreLocationError(
            f"file://{_cut(host)}/… names a host: write three slashes and an absolute path, as file:///mnt/archive"
        )
    if not prefix:
        raise StoreLocationError("file:/// has no path: name a directory, as file:///mnt/archive")
    if options:
        raise StoreLocationError(f"file:// takes no option, and {next(iter(options))} is one: leave it out")
    return StoreLocation("file", "", prefix)


def _bucket(scheme: str, bucket: str) -> str:
    noun = "container" if scheme == "abfs" else "bucket"
    if not bucket:
        raise StoreLocationError(f"the URL names no {noun}: write {scheme}://{noun}/prefix")
    if scheme == "abfs" and _ACCOUNT.fullmatch(bucket):
        return bucket
    if ":" in bucket:
        raise StoreLocationError(
            f"{_shown(bucket)} is a host and a port, not a {noun}: write {scheme}://{noun}/prefix?endpoint=http://{_cut(bucket)}"
        )
    if not _BUCKET.fullmatch(bucket):
        raise StoreLocationError(f"{_shown(bucket)} cannot name a {noun}: 3 or more lower-case letters, digits, dots and hyphens")
    return bucket


def _prefix(path: str) -> str:
    prefix = path.strip("/")
    if bad := re.search(r"[\s%\\\x00-\x1f\x7f*?\"<>|]", prefix):
        raise StoreLocationError(f"the prefix has the character {bad[0]!r}: choose a prefix of letters, digits and -_./=")
    if any(step in ("", ".", "..") for step in prefix.split("/")) and prefix:
        raise StoreLocationError("the prefix has a step that is empty, '.' or '..': write it without them")
    return prefix


def _options(scheme: str, query: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in OPTIONS:
            raise StoreLocationError(_unknown_option(scheme, name))
        if name in found:
            raise StoreLocationError(f"the option {name} is there twice: keep one")
        found[name] = _endpoint(value) if name == "endpoint" else _region(value)
    return found


def _region(value: str) -> str:
    if not _REGION.fullmatch(value):
        raise StoreLocationError(f"region must be a name such as eu-west-1, got {_shown(value)}")
    return value


def _endpoint(value: str) -> str:
    try:
        parts = urlsplit(value)
        parts.port  # noqa: B018 - raises ValueError for what is not a port
    except ValueError:
        parts = urlsplit("")
    if parts.username is not None:
        raise StoreLocationError(
            "the endpoint has a user or a password in it: leave them out; credentials come from the environment"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query or parts.fragment:
        raise StoreLocationError(f"endpoint must be http://host:port or https://host:port, got {_shown(value)}")
    return value.rstrip("/")


def _unknown_scheme(scheme: str) -> str:
    if scheme in ("http", "https"):
        return f"{scheme}:// names a server, not a bucket: write s3://bucket/prefix?endpoint={scheme}://host:port"
    near = _OTHER_NAMES.get(scheme.lower()) or next(iter(get_close_matches(scheme.lower(), SCHEMES, 1)), None)
    did_you_mean = f"; did you mean {near}://?" if near else ""
    return f"unknown scheme {_shown(scheme)}: {', '.join(f'{known}://' for known in SCHEMES)} are possible{did_you_mean}"


def _unknown_option(scheme: str, name: str) -> str:
    if _SECRET.search(name):
        return (
            f"the URL carries {_shown(name)}, and URLs are stored and shown in the clear: leave it out. "
            f"The broker reads credentials from its environment ({_ENVIRONMENT[scheme]})"
        )
    near = get_close_matches(name.lower(), OPTIONS, 1, cutoff=0.5)
    return f"unknown option {_shown(name)} in the URL: {' and '.join(OPTIONS)} are possible" + (
        f"; did you mean {near[0]}?" if near else ""
    )


def _user_in_url(scheme: str) -> str:
    noun = "container" if scheme == "abfs" else "bucket"
    return (
        f"the URL has something before an @, and URLs are stored and shown in the clear: write {scheme}://{noun}/prefix alone. "
        f"The broker reads account and credentials from its environment ({_ENVIRONMENT[scheme]})"
    )


def _shown(text: str) -> str:
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}…"
