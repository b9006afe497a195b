"""What do a token and permissions cost those who publish and consume? Throughput with them over that without, no TLS.

Two servers, one open and one that asks for tokens and permissions, take turns, pair after pair, each in another order. 1 KB entries
without batching: the permission is checked once, so nothing should be lost.
"""

from __future__ import annotations

import argparse
import json
import urllib.request

from benchmarks import load
from benchmarks.publish_and_consume import Load, compare, pair_figures
from benchmarks.raw_client import NOTHING, Shown
from benchmarks.report import print_line
from benchmarks.secured_server import ROLE, ConfiguredServer, token_of, token_settings
from benchmarks.server import Server, add_arguments


def grant(server: ConfiguredServer) -> None:
    """Let the benchmark's role publish and consume. The role is not a super-user, so its permissions are really looked at."""
    url = f"{server.admin_url}/admin/v2/namespaces/public/default/permissions/{ROLE}"
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token_of(server.root, 'root')}"}
    request = urllib.request.Request(url, json.dumps(["produce", "consume"]).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=30):
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each half of a pair")
    parser.add_argument("--pairs", type=int, default=25)
    arguments = parser.parse_args()
    if arguments.url is not None:
        parser.error("it needs servers of its own: without --url")
    asking = ConfiguredServer(arguments, start_now=False)
    asking.configure(token_settings(asking.root))
    with Server(arguments) as open_server, asking:
        asking.start()
        asking.wait_until_admin_answers()
        grant(asking)
        sides = (open_server, open_server.url, NOTHING), (asking, asking.url, Shown(token=token_of(asking.root, ROLE)))
        each = Load(bytes(1000), window=1000)
        pairs = load.run(compare(sides, each, "authorization", pairs=arguments.pairs, seconds=arguments.seconds))
        print_line(
            "authorization_cost",
            figures=pair_figures(pairs, "open", "asking"),
            load={"entry_bytes": 1000, "window_entries": 1000, "pairs": arguments.pairs, "seconds": arguments.seconds},
            settings=open_server.settings,
        )


if __name__ == "__main__":
    main()
