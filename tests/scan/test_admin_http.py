"""The admin client of readers against real sockets: addresses, redirects, retries, kept connections, refusals."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from cepheid_decode import AdminRefusedError, BadOptionError, PlanSource, PlanUnavailableError
from cepheid_scan.admin_http import AdminHttp, origins_of
from cepheid_security.client_environment import ClientSecrets
from cepheid_security.oauth2 import TokenRefusedError, TokenRequestError
from tests.support import free_port

TOKEN = "very-secret-token"


class Site:
    """A server with scripted answers: a status and a body, or a redirect; the last one again and again."""

    def __init__(self, *answers: tuple[int, str], kind: str = "HTTP/1.1") -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, str]] = []  # method, path, token
        self.connections = 0
        site = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version: ClassVar[str] = kind

            def setup(self) -> None:
                super().setup()
                site.connections += 1

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                site.asked.append((self.command, self.path, self.headers.get("Authorization", "")))
                status, text = site.answers.pop(0) if len(site.answers) > 1 else site.answers[0]
                self.send_response(status)
                if status in (302, 307):
                    self.send_header("Location", text)
                    text = ""
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = do_POST = do_DELETE = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    made: list[Site] = []
    yield made
    for site in made:
        site.stop()


def new_site(sites: list[Site], *answers: tuple[int, str], **kind: str) -> Site:
    sites.append(Site(*(answers or ((200, '{"ok": 1}'),)), **kind))
    return sites[-1]


def test_a_service_url_is_enough(sites: list[Site]) -> None:
    """The protocol port redirects, the admin port redirects to the owner, and the way is remembered up to the admin port."""
    owner = new_site(sites)
    admin = new_site(sites, (307, f"http://{owner.address}/x?a=b"))
    protocol = new_site(sites, (307, f"http://{admin.address}/x?a=b"), kind="HTTP/1.0")
    with closing(AdminHttp(PlanSource(service_url=f"pulsar://{protocol.address}", secrets=ClientSecrets(TOKEN)))) as http:
        for _ in range(3):
            assert http.get("/x", {"a": "b", "left_out": None}) == {"ok": 1}
    assert [len(site.asked) for site in (protocol, admin, owner)] == [1, 3, 3]
    assert set(owner.asked) == {("GET", "/x?a=b", f"Bearer {TOKEN}")}
    assert owner.connections == 1, "connections are kept"


def test_what_changes_something_is_sent_to_the_admin_port_alone(sites: list[Site]) -> None:
    """A protocol port looks at no body: it is asked where its admin port is, first."""
    admin = new_site(sites)
    protocol = new_site(sites, (307, f"http://{admin.address}/admin/v2/clusters"), kind="HTTP/1.0")
    with closing(AdminHttp(PlanSource(service_url=f"pulsar://{protocol.address}"))) as http:
        assert http.request("POST", "/change", body={"a": 1}) == {"ok": 1}
    assert [method for method, _, _ in protocol.asked] == ["GET"]
    assert [(method, path) for method, path, _ in admin.asked] == [("GET", "/admin/v2/clusters"), ("POST", "/change")]


def test_another_address_is_tried(sites: list[Site]) -> None:
    site = new_site(sites)
    with closing(AdminHttp(PlanSource(admin_url=f"http://127.0.0.1:{free_port()},{site.address}", retry_s=0))) as http:
        assert http.get("/x") == {"ok": 1}


def test_a_remembered_way_that_ends_is_forgotten(sites: list[Site]) -> None:
    gone, back = new_site(sites), new_site(sites)
    protocol = new_site(sites, (307, f"http://{gone.address}/x"), (307, f"http://{back.address}/x"), kind="HTTP/1.0")
    with closing(AdminHttp(PlanSource(service_url=f"pulsar://{protocol.address}", retry_s=0))) as http:
        assert http.get("/x") == {"ok": 1}
        sites.remove(gone)
        gone.stop()
        http.close()  # what was kept to it
        assert http.get("/x") == {"ok": 1}
    assert len(back.asked) == 1


def test_who_cannot_say_now_is_asked_again(sites: list[Site]) -> None:
    site = new_site(sites, (503, '{"reason": "loading"}'), (503, '{"reason": "loading"}'), (200, "[1]"))
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", retry_s=10))) as http:
        assert http.get("/x") == [1]
    assert len(site.asked) == 3


def test_giving_up_names_every_address_and_what_it_said(sites: list[Site]) -> None:
    site = new_site(sites, (503, '{"reason": "loading"}'))
    port = free_port()
    began = time.monotonic()
    with closing(
        AdminHttp(PlanSource(admin_url=f"http://127.0.0.1:{port},{site.address}", secrets=ClientSecrets(TOKEN), retry_s=0.3))
    ) as http:
        with pytest.raises(PlanUnavailableError) as failed:
            http.get("/x")
    assert 0.1 < time.monotonic() - began < 30
    text = str(failed.value)
    assert f"127.0.0.1:{port}: nothing listens there" in text
    assert f"{site.address}: status 503, loading" in text
    assert TOKEN not in text + repr(failed.value.facts) + repr(http)
    assert failed.value.retriable


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, '{"reason": "Topic x does not exist"}', "Topic x does not exist"),
        (403, '{"reason": "not for you"}', "not for you"),
        (401, "", "no reason given"),
        (500, "<html>" + "x" * 5000, "<html>" + "x" * 494),
        (412, "[1, 2]", "[1, 2]"),
    ],
)
def test_a_refusal_is_an_answer(sites: list[Site], status: int, body: str, reason: str) -> None:
    site = new_site(sites, (status, body))
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", secrets=ClientSecrets(TOKEN), retry_s=30))) as http:
        with pytest.raises(AdminRefusedError) as refused:
            http.get("/x?secret=1")
    assert (refused.value.status, refused.value.reason) == (status, reason)
    assert ("token" in str(refused.value)) == (status in (401, 403)), "says what to do where it is about rights"
    assert TOKEN not in str(refused.value)
    assert len(site.asked) == 1


@pytest.mark.parametrize(
    "text", ["404 page not found", "<html>nginx</html>", "", '{"message": "no Route matched"}', "[]", '{"reason": 3}']
)
def test_a_404_that_no_broker_has_said_is_no_answer(sites: list[Site], text: str) -> None:
    """An ingress that is loaded anew knows no way for a moment: topics and leases would look as if they were gone."""
    site = new_site(sites, (404, text), (404, text), (200, "[1]"))
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", retry_s=10))) as http:
        assert http.get("/x") == [1]
    away = new_site(sites, (404, text))
    with closing(AdminHttp(PlanSource(admin_url=f"http://{away.address}", retry_s=0))) as http:
        with pytest.raises(PlanUnavailableError, match="404"):
            http.get("/x")


def test_answers_of_something_else(sites: list[Site]) -> None:
    page, around = new_site(sites, (200, "<html>a proxy</html>")), new_site(sites, (307, "/again"))
    for site, said in ((page, "not JSON"), (around, "redirects")):
        with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", retry_s=0))) as http:
            with pytest.raises(PlanUnavailableError, match=said):
                http.get("/x")
    away = new_site(sites, (307, "ftp://elsewhere/x"))
    with closing(AdminHttp(PlanSource(admin_url=f"http://{away.address}", retry_s=0))) as http:
        with pytest.raises(PlanUnavailableError, match="ftp://elsewhere"):
            http.get("/x")


def test_a_kept_connection_that_was_closed_meanwhile_is_no_failure(sites: list[Site]) -> None:
    site = new_site(sites)
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", retry_s=0))) as http:
        assert http.get("/x") == {"ok": 1}
        port = site.server.server_port
        site.stop()
        sites.remove(site)
        for _, connection in http._idle:
            connection.sock.shutdown(2)  # what the server's end would do
        again = Site((200, json.dumps({"again": True})))
        sites.append(again)
        http._origins = [("http", "127.0.0.1", again.server.server_port)]
        http._idle = [(http._origins[0], connection) for _, connection in http._idle]
        assert http.get("/x") == {"again": True}, f"not at port {port} any more"


def test_many_threads_share_one(sites: list[Site]) -> None:
    site = new_site(sites)
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}"))) as http:
        failures: list[Exception] = []

        def ask() -> None:
            try:
                for _ in range(10):
                    assert http.get("/x") == {"ok": 1}
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert len(http._idle) <= 8
    assert len(site.asked) == 80


@pytest.mark.parametrize(
    ("source", "origins"),
    [
        (PlanSource(service_url="pulsar://a,b:7000"), [("pulsar", "a", 6650), ("pulsar", "b", 7000)]),
        (PlanSource(service_url="http://a/"), [("http", "a", 8080)]),
        (PlanSource(service_url="pulsar+ssl://a,b:7000"), [("pulsar+ssl", "a", 6651), ("pulsar+ssl", "b", 7000)]),
        (PlanSource(service_url="pulsar://a", admin_url="https://[::1]:1,b"), [("https", "::1", 1), ("https", "b", 8443)]),
        (
            PlanSource(service_url="pulsar://a:1, pulsar://b:2,c/"),
            [("pulsar", "a", 1), ("pulsar", "b", 2), ("pulsar", "c", 6650)],
        ),
    ],
)
def test_addresses(source: PlanSource, origins: list[tuple[str, str, int]]) -> None:
    assert origins_of(source) == origins


@pytest.mark.parametrize(
    "url",
    [
        *("", "a:1", "ftp://a", "pulsar://", "http://a:x", "http://a:0", "pulsar://a,,b"),
        *("pulsar://a,http://b", "pulsar://a:6650/b", "http://a?b=c", "pulsar://[::1", "pulsar://a b:1", "http://user:secret@a"),
        *("http://u:secret/w@a", "http://user:secret,ret@a", "http://user:secret?ret@a", "pulsar+ssl://user:secret@a"),
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadOptionError) as refused:
        AdminHttp(PlanSource(service_url=url))
    assert "secret" not in f"{refused.value} {refused.value.facts}"


def test_a_token_is_sent_without_what_a_file_or_a_variable_ends_with(sites: list[Site]) -> None:
    site = new_site(sites)
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", secrets=ClientSecrets(f" {TOKEN}\n")))) as http:
        http.get("/x")
    assert site.asked[0][2] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("token", ["very-secret\ntoken", "very-secret-tökén", "very-secret\x00token"])
def test_a_token_that_cannot_be_sent_is_refused_at_once_and_not_shown(token: str) -> None:
    """http.client would quote it."""
    with pytest.raises(BadOptionError, match="its text is not shown") as refused:
        AdminHttp(PlanSource(admin_url="http://127.0.0.1:1", secrets=ClientSecrets(token), retry_s=60))
    assert "secret" not in str(refused.value)


def test_a_token_that_expires_is_renewed_for_the_next_request(sites: list[Site]) -> None:
    """A long read asks for new tickets again and again."""
    site, tokens = new_site(sites), iter(["first", "second"])
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", secrets=ClientSecrets(lambda: next(tokens))))) as http:
        http.get("/x")
        http.get("/x")
    assert [asked[2] for asked in site.asked] == ["Bearer first", "Bearer second"]


def test_a_user_with_a_password_is_shown_as_basic(sites: list[Site]) -> None:
    site = new_site(sites)
    secrets = ClientSecrets(password=("ann", "secret"))
    with closing(AdminHttp(PlanSource(admin_url=f"http://{site.address}", secrets=secrets))) as http:
        http.get("/x")
    assert site.asked[0][2] == "Basic YW5uOnNlY3JldA=="


@pytest.mark.parametrize(
    ("error", "raised"), [(TokenRefusedError("invalid_client"), BadOptionError), (TokenRequestError("away"), PlanUnavailableError)]
)
def test_an_issuer_that_is_away_is_asked_again_and_one_that_refuses_is_not(
    sites: list[Site], error: Exception, raised: type[Exception]
) -> None:
    site, asked = new_site(sites), []

    def token() -> str:
        asked.append(1)
        raise error

    source = PlanSource(admin_url=f"http://{site.address}", secrets=ClientSecrets(token), retry_s=0.2)
    with closing(AdminHttp(source)) as http, pytest.raises(raised):
        http.get("/x")
    assert (len(asked) > 1) == (raised is PlanUnavailableError)
    assert not site.asked
