"""Password files, certificates of one's own, and their exchange."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import itertools
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path

import bcrypt
import pytest

from cepheid_security import (
    AuthenticationError,
    Credentials,
    Principal,
    SecurityConfigurationError,
    ServerTls,
    certificate_expires_at_ms,
    certificate_names,
    client_context,
)
from cepheid_security.authenticator import MAX_PASSWORD_CHECKS_OF_ADDRESS, Authenticator
from cepheid_security.authority import ROTATION_STAGES, Authority
from cepheid_security.passwords import VerifiedPasswords, check_password, read_passwords
from cepheid_security.settings import AuthenticationSettings

NOW = datetime.datetime.now(datetime.UTC)


def hashed(password: bytes) -> str:
    return bcrypt.hashpw(password, bcrypt.gensalt(4)).decode()


def test_users_are_told_by_their_passwords(tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text(f"# people\nann:{hashed(b'a:b')}\n\nbob:{hashed(b'x' * 72)}\n")
    users = read_passwords(str(file))
    assert check_password(users, b"ann:a:b").role == "ann"
    assert check_password(users, b"bob:" + b"x" * 72).role == "bob"
    for wrong in (b"ann:", b"ann", b"", b"eve:a:b", b"\xff:x", b"bob:" + b"x" * 73):
        with pytest.raises(AuthenticationError, match="the user name or the password is wrong"):
            check_password(users, wrong)


@pytest.mark.parametrize(
    "line", ["ann:$apr1$salt$hash", "ann:{SHA}abc=", "ann", ":x", "ann:$2y$05$short", "ann:$2y$99$" + "a" * 53]
)
def test_hashes_that_are_broken_are_refused_by_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "users"
    file.write_text(f"# one\n{line}\n")
    with pytest.raises(SecurityConfigurationError, match="line 2: expected user:bcrypt-hash"):
        read_passwords(str(file))


async def handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = "localhost") -> tuple[str, ...]:
    """Connect once. Return the names of the client's certificate as the server sees them."""
    seen: asyncio.Future[tuple[str, ...]] = asyncio.get_running_loop().create_future()

    def on_connected(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.set_result(certificate_names(writer.get_extra_info("ssl_object").getpeercert()))
        writer.close()

    listening = await asyncio.start_server(on_connected, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
        await reader.read()
        writer.close()
        return await seen


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    issuer = Authority(tmp_path, NOW)
    issuer.issue("server", hosts=("localhost", "127.0.0.1"), for_servers=True)
    issuer.issue("client", for_servers=False)
    return tmp_path


def server_tls(directory: Path) -> ServerTls:
    files = (str(directory / "server.pem"), str(directory / "server-key.pem"))
    return ServerTls(*files, client_ca_file=str(directory / "ca.pem"), client_certificates="optional")


async def test_certificates_of_the_own_ca_are_accepted_on_both_sides(authority: Path) -> None:
    ca = str(authority / "ca.pem")
    mutual = client_context(ca_file=ca, certificate_file=str(authority / "client.pem"), key_file=str(authority / "client-key.pem"))
    server = server_tls(authority).context
    assert await handshake(server, mutual) == ("client",)
    assert await handshake(server, client_context(ca_file=ca)) == ()
    for context, name in ((client_context(ca_file=ca), "elsewhere"), (client_context(), "localhost")):
        with pytest.raises(ssl.SSLCertVerificationError):
            await handshake(server, context, name)
    files = (str(authority / "client.pem"), str(authority / "client-key.pem"))
    with pytest.raises(ssl.SSLCertVerificationError):  # a client's certificate does not serve as a server's
        await handshake(ServerTls(*files).context, client_context(ca_file=ca, check_hostname=False))


async def test_a_process_trusts_others_that_are_one_stage_of_a_new_ca_ahead_or_late(authority: Path, tmp_path: Path) -> None:
    stages = [authority]
    for stage in ROTATION_STAGES:
        stages.append(tmp_path / "stages" / stage)
        shutil.copytree(stages[-2], stages[-1], ignore=shutil.ignore_patterns("stages"))
        Authority(stages[-1], NOW).rotate(stage)
    for before, after in itertools.pairwise(stages):
        for server, client in ((before, after), (after, before), (after, after)):
            files = (str(client / "client.pem"), str(client / "client-key.pem"))
            context = client_context(ca_file=str(client / "ca.pem"), certificate_file=files[0], key_file=files[1])
            assert await handshake(server_tls(server).context, context) == ("client",)
    with pytest.raises(ssl.SSLCertVerificationError):
        await handshake(server_tls(stages[-1]).context, client_context(ca_file=str(authority / "ca.pem")))


async def test_old_versions_of_tls_are_refused(authority: Path) -> None:
    client = client_context(ca_file=str(authority / "ca.pem"))
    client.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    server = server_tls(authority)
    assert await handshake(server.context, client) == ()
    files = (str(authority / "server.pem"), str(authority / "server-key.pem"))
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await handshake(ServerTls(*files, minimum_version="1.3").context, client)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="Python's own TLS cannot ask for a renegotiation")
async def test_a_renegotiation_is_refused(authority: Path) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\n")
        with contextlib.suppress(OSError):
            while await reader.read(100):
                pass
        writer.close()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_tls(authority).context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(
        "openssl", "s_client", "-tls1_2", "-connect", address, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
    )
    assert client.stdin is not None
    assert client.stdout is not None
    await client.stdout.readuntil(b"hello\n")
    client.stdin.write(b"R\n")  # what s_client takes for a wish to renegotiate
    await client.stdin.drain()
    said = await client.stdout.read()
    assert b"RENEGOTIATING" in said
    assert b"no renegotiation" in said
    await client.wait()
    await ended.wait()
    server.close()
    await server.wait_closed()


async def test_new_files_are_used_for_new_connections_and_unusable_ones_are_not(authority: Path, tmp_path: Path) -> None:
    server = server_tls(authority)
    client = client_context(ca_file=str(authority / "ca.pem"))
    assert not server.reload_if_changed()
    key = (authority / "server-key.pem").read_bytes()
    os.replace(authority / "client-key.pem", authority / "server-key.pem")  # of another certificate
    with pytest.raises(SecurityConfigurationError, match=r"server\.pem with key .*key values mismatch"):
        server.reload_if_changed()
    assert await handshake(server.context, client) == (), "the pair from before is still in use"
    (authority / "server-key.pem").unlink()
    (authority / "server-key.pem").write_bytes(key)
    assert server.reload_if_changed()
    assert not server.reload_if_changed()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(SecurityConfigurationError, match="certificate /no/such with key /no/key cannot be used: No such file"):
        ServerTls("/no/such", "/no/key")
    with pytest.raises(SecurityConfigurationError, match=r"the CA file .*empty\.pem cannot be used"):
        client_context(ca_file=str(empty))
    with pytest.raises(SecurityConfigurationError, match="no CA is given"):
        ServerTls("x", "y", client_certificates="required")


def test_private_keys_are_readable_by_their_owner_alone(authority: Path) -> None:
    assert {path.stat().st_mode & 0o777 for path in authority.glob("*-key.pem")} == {0o600}


@pytest.mark.parametrize(
    ("subject", "names"),
    [
        ((), ()),  # a host's certificate is no role, whatever its DNS names
        (((("commonName", "billing"),),), ("billing",)),
        (((("commonName", "billing"),), (("commonName", "admin"),)), ()),
    ],
)
def test_the_common_name_alone_is_the_role(subject: tuple[object, ...], names: tuple[str, ...]) -> None:
    assert certificate_names({"subject": subject, "subjectAltName": (("DNS", "admin"),)}) == names


async def test_a_role_holds_as_long_as_its_certificate() -> None:
    now_ms = 1_000

    async def not_blocking(work: Callable[[], Principal]) -> Principal:
        return work()

    authenticator = Authenticator(AuthenticationSettings(methods=("tls",)), lambda: now_ms, not_blocking)
    shown = Credentials("tls", certificate_names=("app",), certificate_expires_at_ms=2_000)
    assert await authenticator.authenticate(shown) == Principal("app", "tls", expires_at_ms=2_000)
    now_ms = 2_000
    with pytest.raises(AuthenticationError, match="the client's certificate has expired"):
        await authenticator.authenticate(shown)
    assert certificate_expires_at_ms({"notAfter": "Jan  5 09:34:43 2018 GMT"}) == 1_515_144_883_000
    assert certificate_expires_at_ms({}) is None


async def test_wrong_passwords_of_one_address_leave_room_for_others(tmp_path: Path) -> None:
    users = tmp_path / "users"
    users.write_text(f"ann:{hashed(b'right')}\n")
    running, most, release = 0, 0, asyncio.Event()

    async def run_blocking(check: Callable[[], Principal]) -> Principal:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            await release.wait()
            return check()
        finally:
            running -= 1

    settings = AuthenticationSettings(methods=("basic",), passwords_file=str(users))
    authenticator = Authenticator(settings, lambda: 0, run_blocking)
    wrong = Credentials("basic", b"ann:wrong", peer="203.0.113.5")
    strangers = [asyncio.ensure_future(authenticator.authenticate(wrong)) for _ in range(40)]
    await asyncio.sleep(0)
    known = asyncio.ensure_future(authenticator.authenticate(Credentials("basic", b"ann:right", peer="198.51.100.7")))
    for _ in range(5):
        await asyncio.sleep(0)
    assert running == MAX_PASSWORD_CHECKS_OF_ADDRESS + 1
    release.set()
    assert (await known).role == "ann"
    refused = await asyncio.gather(*strangers, return_exceptions=True)
    assert all(isinstance(each, AuthenticationError) for each in refused)
    assert most == MAX_PASSWORD_CHECKS_OF_ADDRESS + 1


async def test_a_password_that_was_right_is_not_checked_again_until_the_file_changes(tmp_path: Path) -> None:
    users, checks = tmp_path / "users", 0
    users.write_text(f"ann:{hashed(b'right')}\n")

    async def run_blocking(check: Callable[[], Principal]) -> Principal:
        nonlocal checks
        checks += 1
        return check()

    authenticator = Authenticator(AuthenticationSettings(methods=("basic",), passwords_file=str(users)), lambda: 0, run_blocking)
    right = Credentials("basic", b"ann:right", peer="198.51.100.7")
    for _ in range(3):
        assert (await authenticator.authenticate(right)).role == "ann"
    assert checks == 1
    for _ in range(2):
        with pytest.raises(AuthenticationError):
            await authenticator.authenticate(Credentials("basic", b"ann:wrong", peer="198.51.100.7"))
    assert checks == 3, "wrong ones are checked each time"
    users.write_text(f"ann:{hashed(b'changed')}\n# longer\n")
    assert authenticator.reload_if_changed()
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(right)


async def test_a_password_that_is_exchanged_during_its_check_is_not_remembered(tmp_path: Path) -> None:
    users, started, release = tmp_path / "users", asyncio.Event(), asyncio.Event()
    users.write_text(f"ann:{hashed(b'right')}\n")

    async def run_blocking(check: Callable[[], Principal]) -> Principal:
        started.set()
        await release.wait()
        return check()

    authenticator = Authenticator(AuthenticationSettings(methods=("basic",), passwords_file=str(users)), lambda: 0, run_blocking)
    right = Credentials("basic", b"ann:right", peer="198.51.100.7")
    checking = asyncio.ensure_future(authenticator.authenticate(right))
    await started.wait()
    users.write_text(f"ann:{hashed(b'changed')}\n# longer\n")
    assert authenticator.reload_if_changed()
    release.set()
    await checking
    with pytest.raises(AuthenticationError):
        await authenticator.authenticate(right)


def test_verified_passwords_are_forgotten_after_a_minute_and_beyond_a_bound() -> None:
    verified, ann = VerifiedPasswords(), Principal("ann", "basic")
    verified.add(b"ann:right", ann, 0.0)
    assert (verified.get(b"ann:right", 59.0), verified.get(b"ann:right", 60.0)) == (ann, None)
    assert verified.get(b"ann:wrong", 0.0) is None
    for number in range(1000):
        verified.add(b"user:%d" % number, ann, 1.0)
    assert verified.get(b"ann:right", 1.0) is None
    assert verified.get(b"user:0", 1.0) == ann


async def test_one_host_with_many_ipv6_addresses_has_one_share_of_the_checks(tmp_path: Path) -> None:
    users, running, release = tmp_path / "users", 0, asyncio.Event()
    users.write_text(f"ann:{hashed(b'right')}\n")

    async def run_blocking(check: Callable[[], Principal]) -> Principal:
        nonlocal running
        running += 1
        await release.wait()
        return check()

    authenticator = Authenticator(AuthenticationSettings(methods=("basic",), passwords_file=str(users)), lambda: 0, run_blocking)
    wrong = [Credentials("basic", b"ann:wrong", peer=f"2001:db8::{number:x}") for number in range(20)]
    strangers = [asyncio.ensure_future(authenticator.authenticate(each)) for each in wrong]
    for _ in range(5):
        await asyncio.sleep(0)
    assert running == MAX_PASSWORD_CHECKS_OF_ADDRESS
    release.set()
    await asyncio.gather(*strangers, return_exceptions=True)
