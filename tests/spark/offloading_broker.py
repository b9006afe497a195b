"""A broker's admin port, in front of a real one, for which ledgers are objects: plans name them, without fragments."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from cepheid_decode import PlanSource, ReadSettings, ScanCounters
from cepheid_scan.edges import end_of, first_of
from cepheid_scan.entry_source import EntrySource
from cepheid_scan.open_planner import open_planner
from cepheid_scan.splits import TopicRange, cut_ranges
from tests.scan.segment_objects import write_object

_OF_BOOKIES = ("digest_type", "master_key", "ensemble_size", "write_quorum", "fragments")


class OffloadingBroker:
    def __init__(self, admin_url: str, directory: Path) -> None:
        self._admin_url = admin_url
        self._directory = directory
        self._urls: dict[int, str] = {}
        self._only_objects: set[int] = set()
        broker = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                broker._answer(self)

            do_POST = do_PUT = do_DELETE = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def offload(self, topic: str, count: int, *, keeps: int = 0) -> list[int]:
        """The first `count` ledgers of the topic; the last `keeps` of these stay on bookies, too. Their ids."""
        with closing(open_planner(PlanSource(admin_url=self._admin_url))) as planner:
            plan = planner.plan([topic])
        (history,) = plan.topics
        ids = [ledger.ledger_id for ledger in history.ledgers[:count]]
        for ledger in history.ledgers[:count]:
            alone = TopicRange(_only(history, ledger), first_of(_only(history, ledger)), end_of(_only(history, ledger)))
            (task,) = cut_ranges([alone], plan, target_bytes=1 << 30)
            source = EntrySource(dict(task.bookies), task.ticket, ReadSettings(), ScanCounters(), replan=None)
            (piece,) = task.pieces
            path = self._directory / f"{ledger.ledger_id}.parquet"
            self._urls[ledger.ledger_id] = write_object(path, piece, list(source.read(piece)))
        self._only_objects |= set(ids[: count - keeps])
        return ids

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0))) or None
        asked = urllib.request.Request(f"{self._admin_url}{request.path}", body, method=request.command)
        if body:
            asked.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                status, text = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        if status == 200 and request.path.startswith("/cepheid/v1/plan"):
            text = json.dumps(self._moved(json.loads(text))).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)

    def _moved(self, answer: dict[str, Any]) -> dict[str, Any]:
        for plan in answer["plans"]:
            for ledger in plan["ledgers"]:
                if (url := self._urls.get(ledger["ledger_id"])) is None:
                    continue
                is_only = ledger["ledger_id"] in self._only_objects
                ledger["offloaded"] = {"url": url, "object_bytes": 1, "on_bookies": not is_only}
                if is_only:
                    answer["format"] = 2
                    for name in _OF_BOOKIES:
                        ledger.pop(name, None)
        return answer


def _only(history: Any, ledger: Any) -> Any:
    return type(history)(history.topic, history.partition, history.incarnation, (ledger,))
