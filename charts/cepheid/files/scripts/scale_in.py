"""Before an upgrade to fewer bookies: empty those that leave, highest number first, or fail so that nothing is changed.

    scale_in.py --metadata zk://… --cluster my-cepheid --prefix my-cepheid-bookie- --replicas 3

It runs in the image of the upgrade or rollback: one that does not know the storage format of the cluster is refused before any pod
is replaced. Bookies are found in metadata by their names, which are those of their pods. A bookie that is to stay may still be
leaving, if an earlier attempt was given up. This is cancelled. Needs CEPHEID_ADMIN_URL. Safe to repeat: what was moved stays moved.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any

AWAY = "if ZooKeeper is away, repair it, or upgrade with --set scaleIn.enabled=false if the number of bookies does not fall"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metadata", required=True, help="address of the metadata store")
    parser.add_argument("--prefix", required=True, help="beginning of the names of this release's bookies")
    parser.add_argument("--replicas", type=int, required=True, help="number of bookies after the upgrade")
    parser.add_argument("--cluster", required=True, help="name of the cluster")
    options = parser.parse_args()
    known = cepheid("init", "--join", f"--metadata={options.metadata}", f"--cluster={options.cluster}", "--wait=30")
    if known.returncode != 0:
        sys.exit(f"this release cannot run the cluster, so no pod was changed: {known.stderr.strip()}; {AWAY}")
    listed = cepheid("bookies", "list", "--json", f"--metadata={options.metadata}")
    if listed.returncode != 0:
        sys.exit(f"cannot tell which bookies leave: {listed.stderr.strip()}; {AWAY}")
    leaving, staying = plan(json.loads(listed.stdout), options.prefix, options.replicas)
    for bookie in staying:
        print(f"{bookie} stays", flush=True)
        must("bookies", "decommission", bookie, "--cancel")
    if not leaving:
        print("no bookie leaves")
        return
    begun: list[str] = []
    for bookie in leaving:  # all at once, so that nothing is copied to a bookie that leaves next
        asked = cepheid("bookies", "decommission", bookie)
        if asked.returncode != 0:
            for other in begun:
                cepheid("bookies", "decommission", other, "--cancel")
            sys.exit(f"{bookie} cannot leave: {asked.stderr.strip()}")
        begun.append(bookie)
    for bookie in leaving:
        print(f"waiting until {bookie} is empty", flush=True)
        print(must("bookies", "decommission", bookie, "--wait").strip(), flush=True)


def plan(bookies: Iterable[Mapping[str, Any]], prefix: str, replicas: int) -> tuple[list[str], list[str]]:
    """Return the bookies that leave, highest number first, and those that are being emptied and stay."""
    numbers = {}
    for bookie in bookies:
        name = bookie["bookie_id"]
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal():
            numbers[int(name.removeprefix(prefix))] = bookie
    leaving = [numbers[number]["bookie_id"] for number in sorted(numbers, reverse=True) if number >= replicas]
    staying = [numbers[number]["bookie_id"] for number in sorted(numbers) if number < replicas and numbers[number].get("draining")]
    return leaving, staying


def must(*command: str) -> str:
    done = cepheid(*command)
    if done.returncode != 0:
        sys.exit(f"cepheid {' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def cepheid(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["cepheid", *command], capture_output=True, text=True)


if __name__ == "__main__":
    main()
