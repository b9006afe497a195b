"""An authenticator that believes whatever role a client names: tests of permissions need no tokens."""

from __future__ import annotations

from cepheid_security import Credentials, Principal
from cepheid_security.authenticator import Authenticator


class RolesByName(Authenticator):
    """The credentials are the role."""

    def __init__(self) -> None:
        """Without keys and files."""

    async def authenticate(self, credentials: Credentials) -> Principal:
        return Principal(credentials.data.decode(), credentials.method)
