"""An authenticator that believes whatever role a client names: tests of permissions need no tokens."""

from __future__ import annotations

from collections.abc import Callable

from cepheid_security import Credentials, Principal
from cepheid_security.authenticator import Authenticator
from cepheid_security.settings import AuthenticationSettings


class RolesByName(Authenticator):
    """The credentials are the role."""

    def __init__(self) -> None:
        """Without keys and files."""
        super().__init__(AuthenticationSettings(), lambda: 0, _run)

    async def authenticate(self, credentials: Credentials) -> Principal:
        return Principal(credentials.data.decode(), credentials.method)


async def _run(check: Callable[[], Principal]) -> Principal:
    return check()
