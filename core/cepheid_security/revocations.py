"""Tokens revoked before they expire. No I/O: the list is a record in metadata.

A token is revoked by its digest, by its id (claim `jti`), or by its role together with a time: what was issued for the role up to
that time. A token that does not say when it was issued counts as old.

A proxy that speaks for a role shows its own credentials: when those of its client were issued is not known here. So a role whose
tokens were revoked cannot come through a proxy at all until its revocation is taken back.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cepheid_security.principal import AuthenticationError, Principal


@dataclass(frozen=True, slots=True)
class RevokedTokens:
    """The tokens that are revoked now."""

    digests: Collection[str] = frozenset()
    token_ids: Collection[str] = frozenset()
    roles: Mapping[str, int] = field(default_factory=dict)
    """Times in milliseconds by role: tokens issued up to then are revoked."""

    def check(self, principal: Principal) -> None:
        """Raise AuthenticationError if the principal's token is revoked, or the tokens of the role that it acts for."""
        original = principal.original_role
        if original is not None and original in self.roles:
            raise AuthenticationError(
                f"the tokens of {original!r} were revoked, and behind a proxy old ones cannot be told from new ones: connect "
                "without the proxy, or have the revocation of the role taken back"
            )
        token = principal.token
        if token is None:
            return
        if token.digest in self.digests or (token.token_id is not None and token.token_id in self.token_ids):
            raise AuthenticationError("the token was revoked")
        up_to_ms = self.roles.get(principal.role)
        if up_to_ms is not None and (token.issued_at_ms is None or token.issued_at_ms <= up_to_ms):
            raise AuthenticationError(f"the tokens of {principal.role!r} that are as old as this one were revoked")


NOTHING_REVOKED = RevokedTokens()
