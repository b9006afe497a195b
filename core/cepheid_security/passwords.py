"""Users and passwords from a file in the format of `htpasswd -B`: one `user:$2y$…` a line, hashed with bcrypt.

Other hashes of htpasswd (MD5, SHA-1, crypt) are refused when the file is read: they are broken or truncate passwords.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from cepheid_security.principal import AuthenticationError, Principal, SecurityConfigurationError

_BCRYPT = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{53}")
_REMEMBERED_S = 60.0
_MAX_REMEMBERED = 1000
_MAX_PASSWORD_BYTES = 72  # bcrypt ignores the rest of a longer password


def read_passwords(path: str) -> Mapping[str, bytes]:
    """Return the hash of each user. Raises SecurityConfigurationError, which names the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SecurityConfigurationError(f"the password file {path} cannot be read: {error}", path=path) from None
    found: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        user, colon, hashed = line.strip().partition(":")
        if not user or not colon or _BCRYPT.fullmatch(hashed) is None:
            raise SecurityConfigurationError(f"{path}, line {number}: expected user:bcrypt-hash, as `htpasswd -B` writes it")
        found[user] = hashed.encode()
    return found


def check_password(users: Mapping[str, bytes], data: bytes) -> Principal:
    """Check `user:password`. Takes as long for an unknown user as for a wrong password. Blocking for 50 ms or more.

    Raises AuthenticationError, with the same message for every failure.
    """
    import bcrypt

    user, colon, password = data.partition(b":")
    try:
        name = user.decode()
    except UnicodeDecodeError:
        name = ""
    hashed = users.get(name)
    # A hash that no password matches, so that unknown users are not answered sooner.
    matches = bcrypt.checkpw(password[:_MAX_PASSWORD_BYTES], hashed or _like(users)) and len(password) <= _MAX_PASSWORD_BYTES
    if not colon or hashed is None or not matches:
        raise AuthenticationError("the user name or the password is wrong")
    return Principal(name, "basic")


class VerifiedPasswords:
    """Passwords verified within the last minute, so that admin calls and reconnecting clients need not wait for bcrypt, nor for
    other clients' password checks. No clock.

    It stores no password, only a keyed hash of user and password with a random key of this process.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._verified: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()  # until when

    def __repr__(self) -> str:
        return f"<VerifiedPasswords {len(self._verified)}>"

    def get(self, data: bytes, now_s: float) -> Principal | None:
        """Return the principal of a recently verified `user:password`, or None."""
        principal, until_s = self._verified.get(self._digest(data), (None, now_s))
        return principal if now_s < until_s else None

    def add(self, data: bytes, principal: Principal, now_s: float) -> None:
        """Store a `user:password` that was just verified. Beyond the bound the oldest ones are dropped."""
        digest = self._digest(data)
        self._verified[digest] = (principal, now_s + _REMEMBERED_S)
        self._verified.move_to_end(digest)
        if len(self._verified) > _MAX_REMEMBERED:
            self._verified.popitem(last=False)

    def _digest(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, hashlib.sha256)


def _like(users: Mapping[str, bytes]) -> bytes:
    """Return a hash that no password matches, of the highest cost in the file."""
    cost = max((hashed[4:6] for hashed in users.values()), default=b"10")
    return b"$2b$" + cost + b"$" + _NOBODY


_NOBODY = b"C6UzMDM.H6dfI/f/IKcEeO7ZxK1uDg0pJ0Pq1oJx9sZ8i1pQd1D5y"
