"""Private keys for encrypted messages: given as a function, `package.module:function`, or a directory of PEM files.

They are loaded where messages are decoded: in Spark on the executors, so that no key is sent with a task.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cepheid_decode.errors import BadOptionError
from cepheid_wire.payload_decryption import HOW_TO_INSTALL, PayloadDecryptor, PrivateKeyOf, has_cryptography

_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")


@dataclass(frozen=True, slots=True)
class KeyDirectory:
    """Private keys in files of one directory: `NAME.pem`, or `NAME`."""

    path: Path

    def private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:  # chosen by a producer
            raise BadOptionError(f"{name!r} cannot be the name of a file in {self.path}: give a function for such keys")
        for file in (self.path / f"{name}.pem", self.path / name):
            if file.is_file():
                return file.read_bytes()
        raise BadOptionError(f"{self.path} has neither {name}.pem nor {name}")


def checked_keys(given: Any) -> str | PrivateKeyOf | None:
    """Return the argument of `scan` if it can name keys. Raises BadOptionError."""
    if given is None or callable(given) or (isinstance(given, str) and given.strip()):
        return given.strip() if isinstance(given, str) else given
    raise BadOptionError(
        f"decryption keys are a function, 'package.module:function', or a directory of PEM files; got {given!r}", value=repr(given)
    )


def open_decryptor(given: str | PrivateKeyOf | None) -> PayloadDecryptor | None:
    """Return the decryptor of payloads; None: no keys are given. Raises BadOptionError if this host does not have the keys."""
    if given is None:
        return None
    if not has_cryptography():
        raise BadOptionError(f"decryption keys need the library cryptography, which this Python lacks: {HOW_TO_INSTALL}")
    if not isinstance(given, str):
        return PayloadDecryptor(given)
    if (named := _FUNCTION.fullmatch(given)) is not None:
        return PayloadDecryptor(_function(given, *named.groups()))
    if not (path := Path(given)).is_dir():
        raise BadOptionError(
            f"decryption keys: {given!r} is neither a directory on this host nor of the form package.module:function", value=given
        )
    return PayloadDecryptor(KeyDirectory(path).private_key)


def _function(given: str, module: str, name: str) -> PrivateKeyOf:
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # any error of the module's own code
        raise BadOptionError(
            f"decryption keys: {given} cannot be imported: {error or type(error).__name__}", value=given
        ) from error
    if not callable(found):
        raise BadOptionError(f"decryption keys: {given} is not a function, but a {type(found).__name__}", value=given)
    key_of: PrivateKeyOf = found
    return key_of
