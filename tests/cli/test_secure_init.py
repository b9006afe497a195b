"""`cepheid secure init`: run again, with other hosts, after a run that was broken off, and in awkward directories."""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import time
import tomllib
from pathlib import Path

import pytest
import typer
from cryptography import x509

from cepheid_cli import secure
from cepheid_security import SecurityConfigurationError, token_keys
from cepheid_security.authority import ROTATION_STAGES, Authority
from cepheid_security.certificate_revocations import parse_lists
from cepheid_security.tokens import TokenVerifier

NOW = datetime.datetime.now(datetime.UTC)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_second_run_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path)
    before = contents(tmp_path)
    secure.init(tmp_path)
    assert contents(tmp_path) == before
    assert "everything is there already" in capsys.readouterr().out


def test_another_host_is_added_to_those_of_the_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path, ["one.example.org"])
    secure.init(tmp_path, ["two.example.org", "10.0.0.5"])
    assert "server.pem (again, now also for two.example.org, 10.0.0.5)" in capsys.readouterr().out
    issued = Authority(tmp_path, NOW).issued("server")
    assert issued is not None
    assert {"localhost", "one.example.org", "two.example.org", "10.0.0.5"} <= set(issued.hosts)
    with pytest.raises(SecurityConfigurationError, match="'https://x' is neither a host name nor an address"):
        secure.init(tmp_path, ["https://x"])


@pytest.mark.parametrize("missing", ["server.pem", "server-key.pem", "client.pem", "admin.token", "server.toml", "client.env"])
def test_a_run_that_was_broken_off_is_completed(tmp_path: Path, missing: str) -> None:
    secure.init(tmp_path)
    (tmp_path / missing).unlink()
    secure.init(tmp_path)
    assert Authority(tmp_path, NOW).issued("server") is not None
    assert (tmp_path / missing).exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("lost", "reason"),
    [
        (("ca.pem", "ca-key.pem"), "server.pem was not signed by .*ca.pem: remove server.pem and server-key.pem"),
        (("ca.pem",), "has only one of ca.pem and ca-key.pem"),
        (("token.key",), r"admin.token was not made with token.key .*: remove it .*, or restore token.key"),
    ],
)
def test_files_that_do_not_belong_together_are_named(tmp_path: Path, lost: tuple[str, ...], reason: str) -> None:
    secure.init(tmp_path)
    for name in lost:
        (tmp_path / name).unlink()
    with pytest.raises(SecurityConfigurationError, match=reason):
        secure.init(tmp_path)


def test_what_expires_soon_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secure.init(tmp_path)
    before = contents(tmp_path)
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 340 * 86_400 * 10**9)
    secure.init(tmp_path)
    key = token_keys.secret_key(str(tmp_path / "token.key"))
    expires_at_ms = TokenVerifier([key]).verify((tmp_path / "admin.token").read_bytes().strip(), now_ns // 10**6).expires_at_ms
    assert expires_at_ms is not None
    assert expires_at_ms > now_ns // 10**6 + 700 * 86_400_000
    assert (tmp_path / "broker.token").read_bytes() == before["broker.token"]
    later = Authority(tmp_path, NOW + datetime.timedelta(days=380))
    assert later.ensure("server", for_servers=True) == "server.pem (again, it expired soon)"


def test_paths_with_spaces_and_quotes_survive_the_shell_and_the_settings(tmp_path: Path) -> None:
    directory = tmp_path / """it's a "$HOME" \\ place"""
    secure.init(directory)
    settings = tomllib.loads((directory / "server.toml").read_text())
    assert settings["tls"]["certificate_file"] == str(directory / "server.pem")
    script = f'set -e; . {shlex.quote(str(directory / "client.env"))}; cat "$CEPHEID_TOKEN_FILE"'
    found = subprocess.run(["/bin/sh", "-c", script], capture_output=True, check=True, env={"PATH": os.environ["PATH"]})
    assert found.stdout == (directory / "admin.token").read_bytes()


# A directory of an earlier release


def make_old(directory: Path) -> None:
    """As a release made it that had no authorization and no client certificates of tools; with a setting of the operator's own."""
    secure.init(directory)
    for name in ("server.toml", "broker.toml"):
        path = directory / name
        head = path.read_text().partition("[authorization]")[0]
        path.write_text(head.replace('client_certificates = "optional"', 'client_certificates = "required"  # as we want it'))
    environment = directory / "client.env"
    environment.write_text("".join(line for line in environment.read_text().splitlines(keepends=True) if "CERTIFICATE" not in line))


def test_the_ca_is_replaced_and_what_was_issued_is_kept_otherwise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path, ["*.example.org"])
    old = contents(tmp_path)
    secure.rotate_ca(tmp_path, "trust")
    secure.init(tmp_path)
    changed = {name for name, content in contents(tmp_path).items() if old.get(name) != content}
    assert changed == {"ca.pem", "ca-next-key.pem", "crl.pem"}
    secure.rotate_ca(tmp_path, "sign")
    assert "signed by the new CA: admin.pem, bookie.pem, broker.pem, client.pem, server.pem" in capsys.readouterr().out
    secure.rotate_ca(tmp_path, "finish")
    assert (tmp_path / "ca.pem").read_bytes().count(b"BEGIN CERTIFICATE") == 1
    assert not (tmp_path / "ca-next-key.pem").exists()
    issued = Authority(tmp_path, NOW).issued("broker")
    assert issued is not None
    assert {"*.example.org", "localhost", "127.0.0.1"} <= set(issued.hosts)
    capsys.readouterr()
    secure.init(tmp_path)
    secure.rotate_ca(tmp_path, "finish")
    said = capsys.readouterr().out
    assert "everything is there already" in said
    assert "nothing to do, stage finish was taken before" in said


@pytest.mark.parametrize(
    ("taken", "stage", "reason"),
    [
        ((), "sign", "stage trust comes first"),
        (("trust",), "finish", "stage sign comes first"),
        (("trust", "sign"), "trust", "stage finish comes first"),
    ],
)
def test_a_stage_of_a_new_ca_that_leaves_one_out_is_refused(
    tmp_path: Path, taken: tuple[str, ...], stage: str, reason: str
) -> None:
    Authority(tmp_path, NOW).issue("server", for_servers=True)
    for each in taken:
        secure.rotate_ca(tmp_path, each)
    before = contents(tmp_path)
    with pytest.raises(SecurityConfigurationError, match=reason):
        secure.rotate_ca(tmp_path, stage)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("taken", [("trust",), ("trust", "sign")])
def test_a_stage_waits_until_processes_have_read_the_files_of_the_one_before(
    tmp_path: Path, taken: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    Authority(tmp_path, NOW - datetime.timedelta(days=90)).issue("server", for_servers=True)
    for stage in (*taken, taken[-1], ROTATION_STAGES[len(taken)]):  # one twice: nothing to do or to wait for
        secure.rotate_ca(tmp_path, stage, settle_s=180.0)
    assert len(waits) == len(taken)
    assert 170 < waits[-1] <= 180


def test_certificates_that_a_broken_run_left_with_the_old_ca_are_signed_by_the_new_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secure.init(tmp_path)
    secure.rotate_ca(tmp_path, "trust")
    old = contents(tmp_path)
    secure.rotate_ca(tmp_path, "sign")
    for name in ("broker.pem", "broker-key.pem"):
        (tmp_path / name).write_bytes(old[name])
    with pytest.raises(SecurityConfigurationError, match="broker was signed by the old CA: run `cepheid secure init` first"):
        secure.rotate_ca(tmp_path, "finish")
    secure.init(tmp_path)
    assert "broker.pem (again, the old CA signed it)" in capsys.readouterr().out
    secure.rotate_ca(tmp_path, "finish")


def test_what_an_old_directory_leaves_off_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_old(tmp_path)
    before = contents(tmp_path)
    capsys.readouterr()
    secure.init(tmp_path)
    said = capsys.readouterr().out
    assert contents(tmp_path) == before
    assert "broker.toml is of an earlier release and lacks authorization.enabled = true, authorization.super_user_roles" in said
    assert "permissions are off: every client with credentials may do everything" in said
    assert "client.env is of an earlier release and lacks CEPHEID_TLS_CERTIFICATE_FILE" in said
    assert f"cepheid secure init {tmp_path} --update" in said
    assert "bookie.toml" not in said


def test_update_adds_what_is_missing_and_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_old(tmp_path)
    before = contents(tmp_path)
    secure.init(tmp_path, update=True)
    said = capsys.readouterr().out
    assert "broker.toml: added authorization.enabled = true" in said
    after = contents(tmp_path)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"server.toml", "broker.toml", "client.env"}
    settings = tomllib.loads(after["broker.toml"].decode())
    assert settings["authorization"] == {"enabled": True, "super_user_roles": ["admin"], "peer_roles": ["broker"]}
    assert settings["tls"]["client_certificates"] == "required"
    assert b"# as we want it" in after["broker.toml"]
    assert b"export CEPHEID_TLS_CERTIFICATE_FILE=" in after["client.env"]
    secure.init(tmp_path, update=True)
    assert contents(tmp_path) == after
    assert "added" not in capsys.readouterr().out


def test_what_was_switched_off_on_purpose_is_named_and_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path)
    path = tmp_path / "broker.toml"
    path.write_text(path.read_text().replace("enabled = true", "enabled = false"))
    capsys.readouterr()
    secure.init(tmp_path, update=True)
    said = capsys.readouterr().out
    assert "broker.toml switches something off\n  permissions are off" in said
    assert "enabled = false" in path.read_text()


def test_a_revoked_certificate_is_listed_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path)
    old = x509.load_pem_x509_certificate((tmp_path / "bookie.pem").read_bytes()).serial_number
    secure.revoke(tmp_path, "bookie")
    secure.revoke(tmp_path, "serial=0A1B")
    secure.revoke(tmp_path, "0a:1b")
    said = capsys.readouterr().out
    assert f"{old:X} is revoked\nnext:   cepheid secure init" in said
    assert "A1B was revoked before" in said
    secure.init(tmp_path)
    assert "bookie.pem (again, it was revoked)" in capsys.readouterr().out
    secure.revoke(tmp_path)
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [f"{old:X}", "A1B"]
    for what in ("ca", "ca-next", "crl", "no such", "fade", "../bookie", ""):
        with pytest.raises(SecurityConfigurationError, match=r"neither a certificate in .* nor a serial number"):
            secure.revoke(tmp_path, what)
    with pytest.raises(typer.BadParameter, match=r"has no ca-key\.pem"):
        secure.revoke(tmp_path / "elsewhere", "bookie")


def test_each_ca_has_a_revocation_list_while_one_replaces_the_other(tmp_path: Path) -> None:
    secure.init(tmp_path)
    secure.revoke(tmp_path, "client")

    def found() -> list[tuple[int, int]]:
        """For each CA: its lists, and what they revoke."""
        cas = x509.load_pem_x509_certificates((tmp_path / "ca.pem").read_bytes())
        parsed = parse_lists(tmp_path / "crl.pem", (tmp_path / "crl.pem").read_bytes())
        of_ca = [[each for each in parsed if each.is_signature_valid(ca.public_key())] for ca in cas]
        return [(len(each), sum(map(len, each))) for each in of_ca]

    assert found() == [(1, 1)]
    secure.rotate_ca(tmp_path, "trust")
    assert found() == [(1, 1), (1, 0)]
    secure.rotate_ca(tmp_path, "sign")
    secure.revoke(tmp_path, "broker")
    assert found() == [(1, 1), (1, 1)], "the new CA is the first one from now on, and the list of the old one is kept"
    secure.rotate_ca(tmp_path, "finish")
    assert found() == [(1, 1)]


def test_the_name_of_a_file_comes_before_a_serial_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path)
    name = "fade" * 4
    for suffix in ("", "-key"):
        (tmp_path / f"client{suffix}.pem").rename(tmp_path / f"{name}{suffix}.pem")
    number = x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes()).serial_number
    secure.revoke(tmp_path, name)
    assert f"{number:X} is revoked" in capsys.readouterr().out


def test_serial_numbers_of_a_ca_and_of_the_old_ca_are_not_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secure.init(tmp_path)
    ca, client = (x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes()) for name in ("ca", "client"))
    with pytest.raises(SecurityConfigurationError, match="is the number of a CA"):
        secure.revoke(tmp_path, f"{ca.serial_number:X}")
    files = {name: (tmp_path / name).read_bytes() for name in ("client.pem", "client-key.pem")}
    for stage in ("trust", "sign"):
        Authority(tmp_path, datetime.datetime.now(datetime.UTC)).rotate(stage)
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    capsys.readouterr()
    with pytest.raises(SecurityConfigurationError, match="a CA revokes its own certificates alone"):
        secure.revoke(tmp_path, f"{client.serial_number:X}")
    assert "revoked" not in capsys.readouterr().out
