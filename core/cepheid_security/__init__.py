"""Authentication, authorization and TLS, for servers and clients. README.md of `core/` has its files.

What needs more than the standard library (PyJWT, cryptography, bcrypt: extra [server]) is imported when it is used.
"""

from cepheid_security.authorization import NO_GRANTS, Action, Decision, Grants, Need, Roles, decide, usable_topics
from cepheid_security.principal import (
    AuthenticationError,
    AuthenticationUnavailableError,
    Credentials,
    Principal,
    SecurityConfigurationError,
    TokenIdentity,
)
from cepheid_security.tls import ClientTls, ServerTls, certificate_expires_at_ms, certificate_names, client_context

__all__ = [
    "NO_GRANTS",
    "Action",
    "AuthenticationError",
    "AuthenticationUnavailableError",
    "ClientTls",
    "Credentials",
    "Decision",
    "Grants",
    "Need",
    "Principal",
    "Roles",
    "SecurityConfigurationError",
    "ServerTls",
    "TokenIdentity",
    "certificate_expires_at_ms",
    "certificate_names",
    "client_context",
    "decide",
    "usable_topics",
]
