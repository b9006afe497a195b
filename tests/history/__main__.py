"""`python -m tests.history --url pulsar://HOST:6650`: a random workload against any server, and what its history breaks."""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from tests.history.checker import check
from tests.history.events import load, save
from tests.history.told import conduct_as_told, take_standard_output
from tests.history.verdict import Promises
from tests.history.waits import longest_waits
from tests.history.workload import TYPES, Plan, run, run_conducted


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.history", description=__doc__)
    parser.add_argument("--url", default="pulsar://127.0.0.1:6650", help="service URL of any server of the Pulsar protocol")
    parser.add_argument("--topic", default=f"history-{int(time.time())}", help="a topic that does not exist yet, kept long enough")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--types", default=",".join(TYPES), help=f"of {', '.join(TYPES)}")
    parser.add_argument("--batching", action="store_true")
    parser.add_argument("--seeks", action="store_true")
    parser.add_argument("--dedup", action="store_true", help="deduplication is on for the topic: H3 is checked")
    parser.add_argument("--break-command", help="a command that restarts the server and returns when it serves again")
    parser.add_argument("--break-at", default="", help="seconds after which it is called: 3,6")
    parser.add_argument("--told", action="store_true", help="no clock: lines on standard input say what happens (told.py)")
    parser.add_argument("--messages-per-s", type=int, default=200)
    parser.add_argument("--quiet-s", type=float, default=3.0, help="drained is who gets nothing for so long")
    parser.add_argument("--patient", action="store_true", help="consumers that cannot be opened just now are no failure")
    parser.add_argument("--save", type=Path, help="keep the history here")
    parser.add_argument("--judge", type=Path, help="no workload: judge a saved history")
    options = parser.parse_args(arguments)
    if options.judge is not None:
        events = load(options.judge)
    else:
        command = shlex.split(options.break_command or "")
        plan = Plan(
            options.url,
            options.topic,
            seed=options.seed,
            seconds=options.seconds,
            subscriptions=tuple(options.types.split(",")),
            messages_per_s=options.messages_per_s,
            quiet_s=options.quiet_s,
            patient=options.patient,
            batching=options.batching,
            seeks=options.seeks,
            breaks=tuple(float(at_s) for at_s in options.break_at.split(",") if at_s),
        )
        if options.told:
            events = run_conducted(plan, conduct_as_told(sys.stdin, take_standard_output()))
        else:
            events = run(plan, (lambda: subprocess.run(command, check=True)) if command else None)  # type: ignore[arg-type,return-value]
    if options.save is not None:
        save(events, options.save)
    violations = check(events, Promises(deduplication=options.dedup, key_batches=options.batching))
    counts = Counter(event.kind for event in events)
    print(f"{len(events)} events: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}")
    for name, wait_s in longest_waits(events).items():
        print(f"longest wait for a receipt{name and f' after {name}'}: {wait_s:.3f} s")
    for violation in violations[:20]:
        print(violation)
    print(f"{len(violations)} violations" if violations else "no rule is broken")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
