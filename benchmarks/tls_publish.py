"""What does TLS cost those who publish and consume? Throughput over TLS over that without, of one server with both ports.

A producer and a consumer on connections of their own: 1 KB entries, and batches of 1000 × 100 B. Plain and TLS take turns, pair
after pair, each in another order; a ratio is the median of its pairs.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import load
from benchmarks.publish_and_consume import Load, compare, pair_figures
from benchmarks.raw_client import batch_payload
from benchmarks.report import print_line
from benchmarks.secured_server import TlsServer
from benchmarks.server import add_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each half of a pair")
    parser.add_argument("--pairs", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("it needs a server of its own: without --url")
    kinds = {"single_1kb": Load(bytes(1000), window=1000), "batched_100b": Load(batch_payload(1000, 100), window=64, batch=1000)}
    with TlsServer(arguments) as server:
        figures: dict[str, object] = {}
        for kind, each in kinds.items():
            sides = ((server, server.url, server.shown), (server, server.tls_url, server.shown))
            pairs = load.run(compare(sides, each, kind, pairs=arguments.pairs, seconds=arguments.seconds))
            figures |= {f"{kind}_{name}": value for name, value in pair_figures(pairs, "plain", "tls").items()}
        figures["server_cores"] = round(statistics.median(tls.server_cores for _, tls in pairs), 2)
        print_line(
            "tls_publish",
            figures=figures,
            load={"pairs": arguments.pairs, "seconds": arguments.seconds, "producers": 1, "consumers": 1},
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
