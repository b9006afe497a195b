"""Opens a metadata store by URL, so that one setting of a role says where its metadata is.

    zk://host:port[,host:port…][/root]      ZooKeeper; keys are below /root; default port 2181
    zks://host:port[,host:port…][/root]     the same over TLS; the server's certificate must name the host
    rocksdb:///absolute/path                only this machine (rocksdb:relative/path is relative to the current directory)

Credentials are not part of the URL, which appears in logs and process lists: CEPHEID_METADATA_AUTH=digest:user:password,
CEPHEID_METADATA_AUTH_FILE names a file with that text, or `auth`. CEPHEID_METADATA_TLS_CA_FILE names the CA of a ZooKeeper that has
one of its own (docs/security.md).
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from cepheid_metadata.errors import InvalidKeyError, MetadataError
from cepheid_metadata.store import MetadataStore, check_key
from cepheid_ports import Ports
from cepheid_security import ClientTls

if TYPE_CHECKING:
    from cepheid_metadata.kazoo_connection import Digest

AUTH_VARIABLE = "CEPHEID_METADATA_AUTH"
AUTH_FILE_VARIABLE = "CEPHEID_METADATA_AUTH_FILE"
DEFAULT_PORT = 2181
_ADDRESS = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>[0-9]{1,5}))?")


class StoreUrlError(MetadataError):
    """The text is not the address of a metadata store."""

    hint: ClassVar[str] = "zk://host:port[,host:port…][/root] or rocksdb:///path; set credentials in " + AUTH_VARIABLE


class NoSuchStoreError(MetadataError):
    """There is no metadata store in the directory of a URL."""

    hint: ClassVar[str] = "check the path: a standalone server has its store in DATA_DIR/metadata"


async def open_store(
    url: str,
    ports: Ports,
    *,
    session_timeout_s: float = 4.0,
    open_timeout_s: float = 15.0,
    auth: str | None = None,
    private: bool = True,
    tls: ClientTls | None = None,
    must_exist: bool = False,
) -> MetadataStore:
    """Open the store at `url`.

    `auth`: "digest:user:password", else from the environment. `private`: only that user can access what is created. `tls`: for
    zks://, else from the environment, whose files for ZooKeeper take precedence (`ClientTls.of_metadata`). `must_exist`: do not
    create a RocksDB store.

    Raises StoreUrlError; NoSuchStoreError; StoreOpenError, which names the place; SecurityConfigurationError.
    """
    scheme, _, rest = url.partition(":")
    if scheme == "rocksdb":
        directory = _rocksdb_directory(rest)
        if must_exist and _holds_no_store(directory):
            raise NoSuchStoreError(f"there is no metadata store in {directory}", directory=str(directory))
        from cepheid_metadata.rocks_store import RocksStore

        return await RocksStore.open(directory, ports)
    if scheme in ("zk", "zks"):
        addresses, root = parse_zookeeper(rest)
        digest = _digest(auth_from_environment() if auth is None else auth, private)
        if scheme == "zks":
            tls = ClientTls.of_metadata() or tls or ClientTls.from_environment()
            tls.context()  # names a file that cannot be used; kazoo would only retry for ever
        from cepheid_metadata.zookeeper_store import ZooKeeperStore

        return await ZooKeeperStore.open(
            addresses,
            ports,
            root=root,
            digest=digest,
            tls=tls if scheme == "zks" else None,
            session_timeout_s=session_timeout_s,
            open_timeout_s=open_timeout_s,
        )
    raise StoreUrlError(f"unknown kind of metadata store {scheme!r}")  # not the whole URL: it may contain a secret


def auth_from_environment() -> str:
    """Return the credentials from the environment, "" without any. Raises StoreUrlError."""
    if auth := os.environ.get(AUTH_VARIABLE, ""):
        return auth
    path = os.environ.get(AUTH_FILE_VARIABLE, "")
    return read_auth(path) if path else ""


def read_auth(path: str) -> str:
    """Return the credentials in a file. Raises StoreUrlError, without the file's content."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise StoreUrlError(f"the file {path} with the credentials for the metadata store cannot be read: {reason}") from None


def parse_zookeeper(rest: str) -> tuple[list[str], str]:
    """Return addresses and root from the text after `zk:`. Raises StoreUrlError, which never repeats a possible secret."""
    if not rest.startswith("//"):
        raise StoreUrlError("a ZooKeeper URL begins with zk://")
    if "@" in rest or "?" in rest or "#" in rest:
        raise StoreUrlError("a ZooKeeper URL has no user, password or parameters")
    hosts, slash, path = rest[2:].partition("/")
    root = (slash + path).rstrip("/")
    if root:
        try:
            check_key(root)
        except InvalidKeyError as error:
            raise StoreUrlError(f"the root of a ZooKeeper URL is {error.args[0]}") from None
    return [_address(part) for part in hosts.split(",")], root


def _address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if found is None:
        raise StoreUrlError(f"{text!r} is not host:port" if text else "a ZooKeeper URL names at least one host, and no empty ones")
    port = int(found["port"] or DEFAULT_PORT)
    if not 1 <= port <= 65_535:
        raise StoreUrlError(f"{text!r}: a port is between 1 and 65535")
    return f"{found['host']}:{port}"


def _rocksdb_directory(rest: str) -> Path:
    if rest.startswith("//"):
        host, slash, path = rest[2:].partition("/")
        if host:
            raise StoreUrlError(f"a RocksDB store is on this machine, not on {host!r}: rocksdb:/// has three slashes")
        rest = slash + path
    if not rest.strip("/"):
        raise StoreUrlError("a RocksDB URL names a directory")
    return Path(rest)


def _holds_no_store(directory: Path) -> bool:
    try:
        (directory / "CURRENT").stat()  # every RocksDB has this file
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass  # it is unknown; opening it names the reason
    return False


def _digest(auth: str, private: bool) -> Digest | None:
    from cepheid_metadata.kazoo_connection import Digest

    if not auth:
        return None
    scheme, _, rest = auth.partition(":")
    user, colon, password = rest.partition(":")
    if scheme != "digest" or not user or not colon or not password:
        raise StoreUrlError("the credentials for the metadata store must be digest:user:password")  # without repeating them
    return Digest(user, password, private)
