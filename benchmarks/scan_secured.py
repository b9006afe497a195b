"""What do TLS and read tickets cost a scan of history past the brokers?

Two standalone servers have the same history, and neither gives entry logs away (`storage.share_logs = false`): one is open, the
other has TLS and tickets at its bookies' ports. `scan()` reads all of it from one and then from the other, in interleaved pairs,
with the default columns of messages, and as stored entries, which decodes nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime

from benchmarks.report import percentile, print_line
from benchmarks.secured_server import ConfiguredServer
from benchmarks.server import Server, add_arguments
from benchmarks.spark_bench import fill, keep_everything, keyed_batch, seconds
from cepheid_scan import ReadSettings, scan
from cepheid_security import ClientTls
from cepheid_security.authority import Authority

KINDS = {"batches_100b": (1000, 100), "entries_1kb": (None, 1000)}  # messages an entry, bytes a message
MODES = ("messages", "entries")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--megabytes", type=int, default=500, help="of history, of each kind")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2, help="of the scan")
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("it needs servers of its own: without --url")
    plain, secured = (ConfiguredServer(arguments, start_now=False) for _ in range(2))
    with plain, secured:
        tls = configure(plain, secured)
        figures: dict[str, float] = {}
        for server in (plain, secured):
            server.start()
            keep_everything(server.admin_url)
            server.metric("none")  # the bookies' ports open after the admin API
        for kind, (messages, size_bytes) in KINDS.items():
            payload = keyed_batch(messages, size_bytes) if messages else bytes(size_bytes)
            entries = (arguments.megabytes << 20) // len(payload)
            topic = plain.topic(kind)
            for server in (plain, secured):
                asyncio.run(fill(server.url, topic, payload, entries, num_messages=messages))
            for mode in MODES:
                took = measure(plain, secured, topic, mode, tls, arguments)
                ratios = [open_s / secured_s for open_s, secured_s in took]
                figures[f"{kind}_{mode}_ratio"] = round(percentile(ratios, 0.5), 3)
                figures[f"{kind}_{mode}_mb_per_s"] = round(arguments.megabytes / min(secured_s for _, secured_s in took), 1)
        load = {"megabytes": arguments.megabytes, "pairs": arguments.pairs, "threads": arguments.threads}
        print_line("scan_secured", figures=figures, load=load, settings=plain.settings)


def configure(plain: ConfiguredServer, secured: ConfiguredServer) -> ClientTls:
    """Write the settings of both; return what a reader shows to the secured one. Clients publish without TLS to both."""
    authority = Authority(secured.root, datetime.datetime.now(datetime.UTC))
    authority.issue("server", hosts=["127.0.0.1"], for_servers=True)
    authority.issue("reader", for_servers=False)
    files = {name: str(secured.root / name) for name in ("ca.pem", "server.pem", "server-key.pem", "reader.pem", "reader-key.pem")}
    storage = "[storage]\nshare_logs = false\n"
    tls = (
        f'[tls]\ncertificate_file = "{files["server.pem"]}"\nkey_file = "{files["server-key.pem"]}"\n'
        f'client_ca_file = "{files["ca.pem"]}"\nclient_certificates = "optional"\nplain_ports = true\nport = 0\nadmin_port = 0\n'
    )
    for server, text in ((plain, storage), (secured, storage + tls)):
        server.config = server.root / "settings.toml"
        server.config.write_text(text)
    return ClientTls(files["ca.pem"], files["reader.pem"], files["reader-key.pem"])


def measure(
    plain: Server, secured: Server, topic: str, mode: str, tls: ClientTls, arguments: argparse.Namespace
) -> list[tuple[float, float]]:
    """Seconds without and with security, of each pair. A first pair, which warms the page cache, does not count."""

    def read_all(server: Server) -> None:
        reader = scan(topic, service_url=server.url, mode=mode, threads=arguments.threads, settings=ReadSettings(tls=tls))
        rows = sum(batch.num_rows for batch in reader)
        assert rows > 0, "the history is empty"

    pairs = [(seconds(lambda: read_all(plain)), seconds(lambda: read_all(secured))) for _ in range(arguments.pairs + 1)]
    return pairs[1:]


if __name__ == "__main__":
    main()
