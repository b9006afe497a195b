"""The scripts that run in the chart's pods: secrets at the first install, scale-in before an upgrade, settings of one pod."""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import os
import ssl
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cepheid_security import client_context
from tests.charts.chart_pages import CHART
from tests.test_source_rules import FOLDERS, ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"chart_{name}", CHART / "files" / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CERTIFICATES = ("server", "broker", "admin")
"""Of the Secret of brokers."""


class SecretsApi:
    """The Secrets of a namespace, as Kubernetes serves them."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.rpartition("/")[2]
                self._answer(200, api.secrets[name]) if name in api.secrets else self._answer(404, {"message": "not found"})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                name = body["metadata"]["name"]
                if name in api.secrets:
                    self._answer(409, {"message": "exists"})
                else:
                    api.secrets[name] = body
                    self._answer(201, body)

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                data = api.secrets[self.path.rpartition("/")[2]]["data"]
                data |= body["data"]
                for key in [key for key, value in data.items() if value is None]:  # a merge patch removes it
                    del data[key]
                self._answer(200, body)

            def _answer(self, status: int, body: Any) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def file(self, secret: str, key: str) -> bytes:
        return base64.b64decode(self.secrets[secret]["data"][key])


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SecretsApi]:
    command = tmp_path / "cepheid"  # the command of this checkout, whatever is installed
    command.write_text(f"#!{sys.executable}\nfrom cepheid_cli import main\nmain()\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(ROOT / folder) for folder in FOLDERS))
    api = SecretsApi()
    yield api
    api.close()


def ensure(api: SecretsApi, *hosts: str, renew_days: int | None = None, ca_rotation: str = "") -> list[str]:
    create_secrets = script("create_secrets")
    create_secrets.SETTLE_S = 0
    cluster = create_secrets.Kubernetes(api.url, "pub", "token", None)
    wanted = {f"my-{kind}": files for kind, files in create_secrets.FILES.items()}
    create_secrets.RENEW_DAYS = create_secrets.RENEW_DAYS if renew_days is None else renew_days
    lines: list[str] = create_secrets.ensure(cluster, "my-ca", wanted, ["my.pub.svc", "*.my-broker.pub.svc", *hosts], ca_rotation)
    return lines


def test_secrets_are_created_once_and_kept(api: SecretsApi, tmp_path: Path) -> None:
    assert ensure(api) == [f"my-{name} is created" for name in ("ca", "server", "bookie", "client")]
    before = copy.deepcopy(api.secrets)
    assert ensure(api) == [f"my-{name} exists, and is kept" for name in ("ca", "server", "bookie", "client")]
    assert api.secrets == before
    assert [name for name, secret in api.secrets.items() if "ca-key.pem" in secret["data"]] == ["my-ca"]
    assert [name for name, secret in api.secrets.items() if "token.key" in secret["data"]] == ["my-ca", "my-server"]
    for role, secret in (("server", "server"), ("broker", "server"), ("bookie", "bookie")):
        certificate = tmp_path / f"{role}.pem"
        certificate.write_bytes(api.file(f"my-{secret}", f"{role}.pem"))
        decoded = ssl._ssl._test_decode_cert(str(certificate))  # type: ignore[attr-defined]
        assert {"my.pub.svc", "*.my-broker.pub.svc", "localhost"} <= {name for _, name in decoded["subjectAltName"]}


def changed(api: SecretsApi, before: dict[str, Any]) -> dict[str, set[str]]:
    """Return the files that changed, by Secret."""
    found = {
        name: {key for key, value in secret["data"].items() if before[name]["data"].get(key) != value}
        for name, secret in api.secrets.items()
    }
    return {name: keys for name, keys in found.items() if keys}


def test_what_ends_soon_is_renewed_and_keys_stay(api: SecretsApi) -> None:
    ensure(api)
    before = copy.deepcopy(api.secrets)
    ensure(api, renew_days=397)  # as at the end of their life
    assert changed(api, before) == {
        "my-server": {"admin.token", *(f"{name}.pem" for name in CERTIFICATES), *(f"{name}-key.pem" for name in CERTIFICATES)},
        "my-bookie": {"bookie.pem", "bookie-key.pem"},
        "my-client": {"client.pem", "client-key.pem", "admin.pem", "admin-key.pem", "admin.token"},
    }
    for key in ("admin.pem", "admin-key.pem", "admin.token"):
        assert api.file("my-server", key) == api.file("my-client", key)


def test_the_ca_is_replaced_stage_by_stage(api: SecretsApi) -> None:
    ensure(api, ca_rotation="trust")  # at the first install there is nothing to replace
    before = copy.deepcopy(api.secrets)
    bundle = {name: {"ca.pem"} for name in ("my-server", "my-bookie", "my-client")}
    for _ in range(2):  # an upgrade that names a stage again changes nothing
        ensure(api, ca_rotation="trust")
        assert changed(api, before) == {**bundle, "my-ca": {"ca.pem", "ca-next-key.pem"}}
    trusting = copy.deepcopy(api.secrets)
    assert ensure(api, ca_rotation="sign")[1] == "my-ca gets ca.pem, ca-key.pem, and loses ca-next-key.pem"
    signed = {"server": CERTIFICATES, "bookie": ("bookie",), "client": ("admin", "client")}
    assert changed(api, trusting) == {
        "my-ca": {"ca.pem", "ca-key.pem"},
        **{
            f"my-{kind}": {"ca.pem", *(f"{name}.pem" for name in names), *(f"{name}-key.pem" for name in names)}
            for kind, names in signed.items()
        },
    }
    ensure(api, ca_rotation="finish")
    new = api.file("my-ca", "ca.pem")
    assert (new.count(b"BEGIN CERTIFICATE"), new in before["my-ca"]["data"].values()) == (1, False)
    assert {api.file(name, "ca.pem") for name in api.secrets} == {new}
    assert ensure(api)[1:] == [f"my-{name} exists, and is kept" for name in ("server", "bookie", "client")]


def test_a_job_that_was_stopped_between_two_secrets_is_completed(api: SecretsApi) -> None:
    ensure(api)
    ensure(api, ca_rotation="trust")
    before = copy.deepcopy(api.secrets)
    ensure(api, ca_rotation="sign")
    after = api.file("my-ca", "ca.pem")
    api.secrets |= {name: copy.deepcopy(before[name]) for name in ("my-bookie", "my-client")}
    ensure(api, ca_rotation="sign")
    assert changed(api, before)["my-bookie"] == {"ca.pem", "bookie.pem", "bookie-key.pem"}
    assert {api.file(name, "ca.pem") for name in api.secrets} == {after}
    assert api.file("my-server", "admin.pem") == api.file("my-client", "admin.pem")


def test_a_stage_that_leaves_one_out_changes_nothing(api: SecretsApi) -> None:
    ensure(api)
    before = copy.deepcopy(api.secrets)
    with pytest.raises(SystemExit, match=r"rotate-ca failed: .*stage trust comes first"):
        ensure(api, ca_rotation="sign")
    del api.secrets["my-ca"], before["my-ca"]
    with pytest.raises(SystemExit, match="my-ca with the key of the CA is not here: restore it to replace the CA"):
        ensure(api, ca_rotation="trust")
    assert api.secrets == before


def test_a_new_host_is_added_to_the_certificates_of_servers(api: SecretsApi) -> None:
    ensure(api)
    before = copy.deepcopy(api.secrets)
    ensure(api, "broker.example.org")
    assert set(changed(api, before)) == {"my-server", "my-bookie"}
    assert ensure(api, "broker.example.org")[0] == "my-ca exists, and is kept"
    assert not changed(api, copy.deepcopy(api.secrets))


def test_a_deleted_server_secret_comes_back_with_the_key_of_tokens(api: SecretsApi) -> None:
    ensure(api)
    before = copy.deepcopy(api.secrets)
    del api.secrets["my-server"]
    assert ensure(api)[1] == "my-server is created"
    assert api.file("my-server", "admin.token") == api.file("my-client", "admin.token")
    assert api.secrets["my-server"]["data"]["token.key"] == before["my-server"]["data"]["token.key"]
    assert "my-client" not in changed(api, before)


def test_a_lost_key_of_tokens_is_replaced_and_said(api: SecretsApi) -> None:
    """Secrets of releases before the CA's Secret kept the key of tokens as well."""
    ensure(api)
    del api.secrets["my-server"], api.secrets["my-ca"]["data"]["token.key"]
    before = copy.deepcopy(api.secrets)
    assert ensure(api)[0] == "the key of tokens is lost, and a new one is made: give all clients new tokens"
    assert api.file("my-server", "token.key") == api.file("my-ca", "token.key")
    assert changed(api, {"my-server": {"data": {}}, **before})["my-client"] == {"admin.token"}


def test_without_the_authority_nothing_is_renewed_and_nothing_breaks(api: SecretsApi) -> None:
    ensure(api)
    del api.secrets["my-ca"]
    before = copy.deepcopy(api.secrets)
    assert ensure(api) == [
        "my-server, my-bookie, my-client: kept, and never renewed, because my-ca with the key of the CA is not here"
    ]
    assert api.secrets == before


def test_a_secret_that_was_deleted_is_made_again_by_the_same_authority(api: SecretsApi, tmp_path: Path) -> None:
    ensure(api)
    kept, user = api.file("my-client", "ca.pem"), api.file("my-client", "metadata.auth")
    del api.secrets["my-bookie"]
    assert ensure(api)[2:3] == ["my-bookie is created"]
    assert (api.file("my-bookie", "ca.pem"), api.file("my-bookie", "metadata.auth")) == (kept, user)
    for key in ("bookie.pem", "bookie-key.pem", "ca.pem"):
        (tmp_path / key).write_bytes(api.file("my-bookie", key))
    client_context(ca_file=str(tmp_path / "ca.pem")).load_cert_chain(tmp_path / "bookie.pem", tmp_path / "bookie-key.pem")


def test_a_secret_of_an_older_release_gets_what_it_lacks(api: SecretsApi) -> None:
    ensure(api)
    before = copy.deepcopy(api.secrets)
    for key in ("broker.pem", "broker-key.pem"):
        del api.secrets["my-server"]["data"][key]
    assert ensure(api)[1] == "my-server gets broker.pem, broker-key.pem"
    assert changed(api, before) == {"my-server": {"broker.pem", "broker-key.pem"}}


def test_without_the_authority_nothing_is_signed_by_another_one(api: SecretsApi) -> None:
    ensure(api)
    del api.secrets["my-ca"], api.secrets["my-client"]
    with pytest.raises(SystemExit, match="my-server, my-bookie exists, but my-ca with the key of its CA does not"):
        ensure(api)
    assert sorted(api.secrets) == ["my-bookie", "my-server"]


def bookie(name: str, draining: str | None = None) -> dict[str, Any]:
    return {"bookie_id": name, "draining": draining}


@pytest.mark.parametrize(
    ("bookies", "replicas", "leaving", "staying"),
    [
        (["my-bookie-0", "my-bookie-1", "my-bookie-2"], 3, [], []),
        (["my-bookie-0", "my-bookie-9", "my-bookie-10"], 1, ["my-bookie-10", "my-bookie-9"], []),  # as numbers, not as texts
        (["my-bookie-0", "other-bookie-7", "my-bookie-x"], 1, [], []),  # bookies of another release
        ([], 3, [], []),
    ],
)
def test_bookies_above_the_new_number_leave(bookies: list[str], replicas: int, leaving: list[str], staying: list[str]) -> None:
    assert script("scale_in").plan(map(bookie, bookies), "my-bookie-", replicas) == (leaving, staying)


def test_a_bookie_that_was_to_leave_and_is_wanted_again_stays() -> None:
    found = [bookie("my-bookie-0"), bookie("my-bookie-1", "drained"), bookie("my-bookie-2", "draining")]
    assert script("scale_in").plan(found, "my-bookie-", 2) == (["my-bookie-2"], ["my-bookie-1"])


def test_a_release_that_cannot_run_the_cluster_ends_an_upgrade_or_rollback_before_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = tmp_path / "called"
    command = tmp_path / "cepheid"
    command.write_text(f'#!/bin/sh\necho "$1" >> {called}\necho "the cluster has storage format 4" >&2\nexit 1\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(
        "sys.argv", ["scale_in.py", "--metadata", "zk://z", "--cluster", "my", "--prefix", "my-bookie-", "--replicas", "1"]
    )
    with pytest.raises(SystemExit, match="no pod was changed: the cluster has storage format 4"):
        script("scale_in").main()
    assert called.read_text().split() == ["init"]


TOML = 'host = "0.0.0.0"\nrack = "old"\n\n[tls]\nport = 6651\n'


@pytest.mark.parametrize(
    ("environment", "labels", "settings"),
    [
        ({}, {}, {}),
        ({}, {"topology.kubernetes.io/zone": "a"}, {"rack": "a"}),
        ({}, {"topology.kubernetes.io/zone": "a", "topology.kubernetes.io/region": "eu"}, {"rack": "eu/a"}),
        ({"NODE_IP": "10.0.0.7", "EXTERNAL_HOSTS": "a,b,c"}, {}, {"advertised_host": "c"}),
        (
            {"NODE_IP": "10.0.0.7", "FIRST_NODE_PORT": "30650"},
            {},
            {"advertised_host": "10.0.0.7", "advertised_port": 30654, "advertised_admin_port": 30655},
        ),
        (
            {"NODE_IP": "10.0.0.7", "FIRST_NODE_PORT": "30650", "SECURE": "true"},
            {},
            {"advertised_host": "10.0.0.7", "advertised_tls_port": 30654, "advertised_tls_admin_port": 30655},
        ),
    ],
)
def test_settings_of_a_pod_are_put_before_the_tables(
    environment: dict[str, str], labels: dict[str, str], settings: dict[str, Any]
) -> None:
    configure_pod = script("configure_pod")
    found = configure_pod.settings_of_pod({"POD_NAME": "my-broker-2", **environment}, labels)
    assert found == settings
    merged = tomllib.loads(configure_pod.merged(TOML, found))
    assert merged == {"host": "0.0.0.0", "rack": "old", "tls": {"port": 6651}, **settings}


def test_a_broker_without_an_outer_address_says_which_value_lacks_it() -> None:
    with pytest.raises(SystemExit, match=r"external.hosts has 1 addresses, and none for my-broker-2"):
        script("configure_pod").settings_of_pod({"POD_NAME": "my-broker-2", "NODE_IP": "10.0.0.7", "EXTERNAL_HOSTS": "a"}, {})
