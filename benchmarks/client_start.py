"""How soon is the Python client of use? Its import, a cluster for tests with its first message, and a command of the command line.

Each figure is the median over rounds, each in a process of its own:
 - `import_ms`: `import cepheid`, with what `cepheid.connect` loads, beyond `import asyncio`;
 - `first_cluster_s`: `cepheid.testing.Cluster(bookies=3)` until a message has come through, in a process that has imported
   `cepheid.testing` alone, so that it also loads the server; `cluster_s`: the next one of the same process;
 - `topics_list_s`: `cepheid topics list public/default`, the whole process, with a server that runs.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import print_line
from benchmarks.server import Server, add_arguments

IMPORT = """
import asyncio, time
began = time.perf_counter()
import cepheid
cepheid.connect
print((time.perf_counter() - began) * 1000)
"""
CLUSTER = """
import asyncio, time
import cepheid
from cepheid.testing import Cluster

async def first_message():
    began = time.perf_counter()
    async with Cluster(bookies=3) as cluster, cepheid.connect(cluster.url) as client:
        async with client.consumer("first", "s") as consumer, client.producer("first") as producer:
            await producer.send(b"hello")
            await consumer.receive(timeout=60)
            print(time.perf_counter() - began)

for _ in range(2):
    asyncio.run(first_message())
"""


def run(code: str) -> list[float]:
    """Return the numbers that a program in a process of its own prints."""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def topics_list_s(admin_url: str) -> float:
    command = [str(Path(sys.executable).with_name("cepheid")), "topics", "list", "public/default", "--admin-url", admin_url]
    began = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rounds = range(arguments.rounds)
    run(IMPORT)  # compiles the modules where nobody has before
    imports = [run(IMPORT)[0] for _ in rounds]
    first, second = zip(*(run(CLUSTER) for _ in rounds), strict=True)
    with Server(arguments) as server:
        if server.admin_url is None:
            parser.error("--url needs --admin-url: topics are listed by the admin API")
        lists = [topics_list_s(server.admin_url) for _ in rounds]
        settings = server.settings
    print_line(
        "client_start",
        figures={
            "import_ms": round(statistics.median(imports), 1),
            "cluster_s": round(statistics.median(second), 3),
            "first_cluster_s": round(statistics.median(first), 3),
            "topics_list_s": round(statistics.median(lists), 3),
        },
        load={"rounds": arguments.rounds},
        settings=settings,
    )


if __name__ == "__main__":
    main()
