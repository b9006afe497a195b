"""Authentication and TLS, for servers and clients. README.md of `core/` has its files.

What needs more than the standard library (PyJWT, cryptography, bcrypt: extra [server]) is imported when it is used.
"""

from cepheid_security.principal import AuthenticationError, Credentials, Principal, SecurityConfigurationError, TokenIdentity
from cepheid_security.tls import ServerTls, certificate_names, client_context

__all__ = [
    "AuthenticationError",
    "Credentials",
    "Principal",
    "SecurityConfigurationError",
    "ServerTls",
    "TokenIdentity",
    "certificate_names",
    "client_context",
]
