"""The files that the processes of a cluster need besides those of a standalone process, in the directory of `cepheid secure init`.

    broker.pem, bookie.pem, with keys       certificates of the roles `broker` and `bookie`, for servers and clients
    admin.pem, admin-key.pem                a certificate of the role `admin`, for tools that read from bookies
    metadata.auth                           user and password for ZooKeeper: what the cluster creates there is for this user alone
    broker.toml, bookie.toml                settings for `cepheid broker`, `cepheid bookie` and `cepheid autorecovery`

`--secure DIR` of these commands reads the file of the role, and then that of `--config`, whose settings take precedence.
"""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cepheid_cli.toml_edit import UneditableFileError, flattened, with_changes
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid_security.authority import Authority

METADATA_AUTH_FILE = "metadata.auth"
_CERTIFICATES = (("broker", True), ("bookie", True), ("admin", False))
"""Common names of certificates, which are roles, and whether servers use them."""

_HEAD = "# Written by `cepheid secure init`. Every setting is described in docs/settings.md.\n"
_BROKER = """metadata_auth_file = {metadata_auth}

[tls]
certificate_file = {broker_pem}
key_file = {broker_key}
ca_file = {ca}
client_ca_file = {ca}
client_certificates = "optional"
crl = {crl}

[authentication]
methods = ["token", "tls"]
secret_keys = [{token_key}]
own_token_file = {broker_token}

[authorization]
enabled = true
super_user_roles = ["admin"]
peer_roles = ["broker"]
"""
_BOOKIE = """metadata_auth_file = {metadata_auth}

[tls]
certificate_file = {bookie_pem}
key_file = {bookie_key}
client_ca_file = {ca}
crl = {crl}
"""
_AUTORECOVERY = """metadata_auth_file = {metadata_auth}

[tls]
certificate_file = {bookie_pem}
key_file = {bookie_key}
ca_file = {ca}
crl = {crl}
"""
_SETTINGS = {"broker.toml": _BROKER, "bookie.toml": _BOOKIE, "autorecovery.toml": _AUTORECOVERY}


class NotSecuredError(CepheidError):
    """A given directory lacks the files of `cepheid secure init`."""


def add_cluster_files(authority: Authority, directory: Path, hosts: Sequence[str]) -> list[str]:
    """Add missing files to `directory`, and return their names. `hosts`: host names in the certificates for servers."""
    from cepheid_security.authority import write_private

    made: list[str] = []
    for name, is_server in _CERTIFICATES:
        done = authority.ensure(name, hosts=hosts if is_server else (), for_servers=is_server)
        made += [] if done is None else [done]
    if not (directory / METADATA_AUTH_FILE).exists():
        write_private(directory / METADATA_AUTH_FILE, f"digest:cepheid:{secrets.token_urlsafe(32)}\n".encode())
        made.append(METADATA_AUTH_FILE)
    for name, text in cluster_settings(directory).items():
        if not (directory / name).exists():
            write_private(directory / name, text.encode())
            made.append(name)
    return made


def cluster_settings(directory: Path) -> dict[str, str]:
    """Return the text of the settings of each role, by the name of its file."""
    names = {
        "metadata_auth": METADATA_AUTH_FILE,
        "ca": "ca.pem",
        "crl": "crl.pem",
        "broker_pem": "broker.pem",
        "broker_key": "broker-key.pem",
        "broker_token": "broker.token",
        "bookie_pem": "bookie.pem",
        "bookie_key": "bookie-key.pem",
        "token_key": "token.key",
    }
    # A JSON string is a valid TOML string, whatever characters a path has.
    paths = {field: json.dumps(str(directory / name), ensure_ascii=False) for field, name in names.items()}
    return {name: _HEAD + text.format(**paths) for name, text in _SETTINGS.items()}


@dataclass(frozen=True, slots=True)
class OldFile:
    """A settings file that does not enable everything, because it is of an earlier release or was changed.

    `missing`: settings that it lacks, with what `cepheid secure init` writes. `off`: what is off by that, in words.
    """

    path: Path
    missing: dict[str, Any]
    off: list[str]


_OFF = {
    "authorization.enabled": "permissions are off: every client with credentials may do everything",
    "authentication.methods": "clients need not prove who they are",
    "tls.crl": "revoked certificates are accepted",
    "tls.client_ca_file": "certificates of clients are not looked at",
    "metadata_auth_file": "what is created in ZooKeeper is for everybody",
}


def old_files(directory: Path, written: Mapping[str, str]) -> list[OldFile]:
    """Return the files of settings that lack what this release writes into them (`written`: by name), or switch it off.

    A setting with another value is not missing. Raises UneditableFileError.
    """
    found: list[OldFile] = []
    for name, text in written.items():
        path = directory / name
        if not path.exists():
            continue
        try:
            there = flattened(tomllib.loads(path.read_text(encoding="utf-8")))
        except tomllib.TOMLDecodeError as error:
            raise UneditableFileError(f"{path} is not TOML: {error}", path=str(path)) from None
        wanted = flattened(tomllib.loads(text))
        missing = {each: value for each, value in wanted.items() if each not in there}
        off = [said for each, said in _OFF.items() if each in wanted and not there.get(each)]
        if missing or off:
            found.append(OldFile(path, missing, off))
    return found


def add_missing(file: OldFile) -> None:
    """Add the settings that a file lacks, and keep the others. Raises UneditableFileError."""
    from cepheid_security.authority import replace_private

    text = file.path.read_text(encoding="utf-8")
    replace_private(file.path, with_changes(text, file.missing, str(file.path)).encode())


def settings_files(role: str, secure: Path | None, config: Path | None) -> list[Path]:
    """Return the settings files of a role, the one that takes precedence last. Raises NotSecuredError."""
    files = []
    if secure is not None:
        files.append(_require(secure, f"{role}.toml"))
    return [*files, *([config] if config is not None else [])]


def metadata_auth(secure: Path | None) -> str | None:
    """Return the credentials for ZooKeeper in a directory of `cepheid secure init`. Raises NotSecuredError."""
    return None if secure is None else _require(secure, METADATA_AUTH_FILE).read_text(encoding="utf-8").strip()


def _require(secure: Path, name: str) -> Path:
    if not (secure / name).is_file():
        raise NotSecuredError(f"{secure} has no {name}: make it with `cepheid secure init {secure}`", path=str(secure / name))
    return secure / name
