"""How many megabytes a second can one producer publish in large entries? 64 KB each, pipelined, durable before each receipt."""

from __future__ import annotations

import argparse

from benchmarks import load
from benchmarks.publish_single import publish
from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--entry-bytes", type=int, default=64_000)
    parser.add_argument("--window", type=int, default=250, help="entries on their way")
    arguments = parser.parse_args()
    with Server(arguments) as server:
        measured = load.run(publish(server, arguments))
        print_line(
            "publish_large",
            figures={
                "mb_per_s": round(measured.rate_per_s * arguments.entry_bytes / 1e6, 1),
                "entries_per_s": round(measured.rate_per_s),
                **measured.cores(),
            },
            load={
                "entry_bytes": arguments.entry_bytes,
                "window_entries": arguments.window,
                "producers": 1,
                "seconds": arguments.seconds,
            },
            settings=server.settings,
        )


if __name__ == "__main__":
    main()
