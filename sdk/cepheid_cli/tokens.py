"""`cepheid tokens`: create keys and tokens, check and revoke tokens. Only revocations need a server."""

from __future__ import annotations

import json
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, connect_admin, done, print_json, print_table
from cepheid_cli.admin.units import shown_time, time_ms
from cepheid_ports import CepheidError

if TYPE_CHECKING:
    from cepheid.admin.bodies import NewRevocation

app = typer.Typer(name="tokens", help="Create and check tokens that clients authenticate with.", no_args_is_help=True)

_SECRET_BYTES = 64  # long enough for HS512
_MAX_TIME_S = 1 << 40
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}

SecretKey = Annotated[str | None, typer.Option("--secret-key", help="Secret key: path, file: or data:;base64, URL.")]
PrivateKey = Annotated[str | None, typer.Option("--private-key", help="Private RSA or EC key (PKCS #8, DER or PEM).")]
PublicKey = Annotated[str | None, typer.Option("--public-key", help="Public RSA or EC key (X.509, DER or PEM).")]
KeyId = Annotated[str | None, typer.Option("--key-id", help="Name of the key, if a cluster has several.")]


class TokenCommandError(CepheidError):
    """The request is contradictory, or would overwrite a file."""


@app.command(name="create-secret-key")
def create_secret_key(path: Annotated[Path, typer.Argument(help="File to write; it must not exist.")]) -> None:
    """Create a secret key, with which one cluster signs and checks tokens."""
    _write(path, secrets.token_bytes(_SECRET_BYTES))


@app.command(name="create-key-pair")
def create_key_pair(
    private: Annotated[Path, typer.Argument(help="File for the private key, which signs; it must not exist.")],
    public: Annotated[Path, typer.Argument(help="File for the public key, which brokers check with; it must not exist.")],
    algorithm: Annotated[str, typer.Option(help="RS256, or ES256, ES384, ES512.")] = "RS256",
) -> None:
    """Create a pair of keys, so that brokers can check tokens but not create them."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

    curves: dict[str, ec.EllipticCurve] = {"ES256": ec.SECP256R1(), "ES384": ec.SECP384R1(), "ES512": ec.SECP521R1()}
    key: Any
    if algorithm == "RS256":
        key = rsa.generate_private_key(65537, 2048)
    elif algorithm in curves:
        key = ec.generate_private_key(curves[algorithm])
    else:
        raise TokenCommandError(f"the algorithm {algorithm!r} is not one of RS256, {', '.join(curves)}")
    _write(private, key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption()))
    _write(public, key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))


@app.command()
def create(
    role: Annotated[str, typer.Argument(help="Role that the token stands for.")],
    secret_key: SecretKey = None,
    private_key: PrivateKey = None,
    key_id: KeyId = None,
    expires_in: Annotated[str | None, typer.Option(help="Time until it expires, such as 12h, 30d, 1y. Default: never.")] = None,
    audience: Annotated[str | None, typer.Option(help="Audience, if brokers require one.")] = None,
    output: Annotated[Path | None, typer.Option(help="File to write, readable by you alone. Default: standard output.")] = None,
) -> None:
    """Create a token."""
    from cepheid_security import token_keys
    from cepheid_security.tokens import create_token

    if (secret_key is None) == (private_key is None):
        raise TokenCommandError("give one of --secret-key and --private-key")
    if not role.strip():
        raise TokenCommandError("the name of the role is empty")
    key = token_keys.secret_key(secret_key, key_id) if secret_key is not None else token_keys.private_key(private_key or "", key_id)
    claims = {} if audience is None else {"aud": audience}
    seconds = None if expires_in is None else _seconds(expires_in)
    token = create_token(key, role, time.time_ns() // 1_000_000, expires_in_s=seconds, **claims)
    if output is None:
        print(token)
    else:
        _write(output, token.encode() + b"\n")


@app.command()
def validate(
    token: Annotated[str | None, typer.Argument(help="Token. Default: standard input, which process lists do not show.")] = None,
    secret_key: SecretKey = None,
    public_key: PublicKey = None,
    audience: Annotated[str | None, typer.Option(help="Audience that it must have.")] = None,
) -> None:
    """Check a token with a key, and print its role and expiry; without a key, print its content."""
    from cepheid_security import token_keys
    from cepheid_security.tokens import TokenVerifier, read_unverified

    text = (token if token is not None else sys.stdin.read()).strip()
    keys = [token_keys.secret_key(secret_key)] if secret_key is not None else []
    keys += [token_keys.public_key(public_key)] if public_key is not None else []
    if not keys:
        header, claims = read_unverified(text)
        print(json.dumps({"header": header, "claims": claims, "checked": False}, indent=2))
        return
    principal = TokenVerifier(keys, audience=audience).verify(text.encode(), time.time_ns() // 1_000_000)
    expires = None if principal.expires_at_ms is None else _utc(principal.expires_at_ms)
    print(json.dumps({"role": principal.role, "expires": expires, "checked": True}, indent=2))


@app.command()
def revoke(
    token: Annotated[
        Path | None, typer.Argument(help="File with the token to revoke. Default: standard input, unless --id or --role is given.")
    ] = None,
    token_id: Annotated[str | None, typer.Option("--id", help="Revoke the token with this id (its claim jti).")] = None,
    role: Annotated[str | None, typer.Option(help="Revoke the tokens of this role that were issued up to now.")] = None,
    issued_up_to: Annotated[
        str | None, typer.Option(help="With --role: up to this time instead, such as 2026-05-01T12:00 or -15m.")
    ] = None,
    expires_in: Annotated[
        str | None,
        typer.Option(help="When the last of these tokens expires, such as 30d: the entry is then removed. Default: never."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Reason, shown in the list.")] = "",
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the revocation: the token is valid again.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Revoke a token: within a second every broker closes its connections and refuses its calls.

    Only a digest of the token is sent. A token that expires is removed from the list after that time.
    """
    if sum(given is not None for given in (token, token_id, role)) > 1:
        raise TokenCommandError("give one of: a file with a token, --id, --role")
    if issued_up_to is not None and role is None:
        raise TokenCommandError("--issued-up-to needs --role")
    now_ms = time.time_ns() // 1_000_000
    until_ms = None if expires_in is None else now_ms + int(1000 * _seconds(expires_in))
    entry: dict[str, Any] = {"reason": reason, "until_ms": until_ms}
    if role is not None:
        entry |= {"kind": "role", "value": role, "issued_up_to_ms": now_ms if issued_up_to is None else time_ms(issued_up_to)}
    elif token_id is not None:
        entry |= {"kind": "id", "value": token_id}
    else:
        entry |= _digest_of(token)
    if cancel:
        connect_admin(admin_url).revocations.cancel(kind=entry["kind"], value=entry["value"])
        done(f"no longer revoked: {entry['kind']} {entry['value']}")
        return
    connect_admin(admin_url).revocations.add(cast("NewRevocation", entry))
    issued = "" if role is None else f", issued up to {_utc(entry['issued_up_to_ms'])}"
    done(f"revoked: {entry['kind']} {entry['value']}{issued}")


@app.command()
def revoked(as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List revoked tokens that have not expired yet."""
    found = connect_admin(admin_url).revocations.list()
    if as_json:
        print_json(found)
        return
    rows = [
        (
            entry["kind"],
            entry["value"],
            "" if entry["issued_up_to_ms"] is None else shown_time(entry["issued_up_to_ms"]),
            shown_time(entry["revoked_at_ms"]),
            "never" if entry["until_ms"] is None else shown_time(entry["until_ms"]),
            entry["reason"],
        )
        for entry in found
    ]
    print_table(("BY", "VALUE", "ISSUED UP TO", "REVOKED", "LISTED UNTIL", "REASON"), rows)


def _digest_of(file: Path | None) -> dict[str, Any]:
    """Return what identifies a token, and when it expires. Raises TokenCommandError."""
    from cepheid_security.tokens import read_unverified, token_digest

    try:
        text = (sys.stdin.read() if file is None else file.read_text(encoding="ascii")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenCommandError(f"{file} cannot be read: {error}") from None
    _, claims = read_unverified(text)
    expires = claims.get("exp")
    known = expires if isinstance(expires, int | float) and 0 <= expires < _MAX_TIME_S else None
    # An hour later than it says: brokers accept it a little longer, in case clocks differ (clock_leeway_s).
    return {
        "kind": "digest",
        "value": token_digest(text.encode()),
        "until_ms": None if known is None else int((known + _UNITS["h"]) * 1000),
    }


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    if unit not in _UNITS or not number.isascii() or not number.isdecimal() or int(number) == 0:
        raise TokenCommandError(f"{text!r} is not a time: write a number and one of {', '.join(_UNITS)}, such as 12h or 30d")
    return float(int(number) * _UNITS[unit])


def _utc(at_ms: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ms / 1000))


def _write(path: Path, data: bytes) -> None:
    from cepheid_security.authority import write_private

    try:
        write_private(path, data)
    except FileExistsError:
        raise TokenCommandError(f"{path} exists: a key or token is not overwritten; remove it, or choose another name") from None
    except OSError as error:
        raise TokenCommandError(f"{path} cannot be written: {error.strerror}") from None
    print(f"written: {path}", file=sys.stderr)
