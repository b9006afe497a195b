"""Authentication and TLS, for servers and clients. README.md of `core/` has its files.

What needs more than the standard library (PyJWT, cryptography, bcrypt: extra [server]) is imported when it is used.
"""

from cepheid_security.principal import AuthenticationError, Credentials, Principal, SecurityConfigurationError
from cepheid_security.tls import ClientTls, ServerTls, certificate_names, client_context

__all__ = [
    "AuthenticationError",
    "ClientTls",
    "Credentials",
    "Principal",
    "SecurityConfigurationError",
    "ServerTls",
    "certificate_names",
    "client_context",
]
