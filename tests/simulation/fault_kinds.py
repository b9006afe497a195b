"""Every kind of fault by the name under which `FaultPlan` counts it, in the rows of the fault model, with where it is dealt out.

`KINDS` is what a campaign must have seen each of (rare ones over the seeds of CI); the table in README.md is made of it.
"""

from __future__ import annotations

from collections.abc import Iterator

MODEL: tuple[tuple[str, tuple[tuple[str, tuple[str, ...]], ...]], ...] = (
    (
        "crash of machine or process, between any two steps",
        (
            (
                "nemesis_machines.py",
                ("power loss", "power loss everywhere", "power loss of a broker", "bookie crash", "broker crash"),
            ),
            ("nemesis_machines.py", ("power loss before a step", "crash before a step", "broker crash before a step")),
            ("cluster.py", ("crash at a disk operation",)),
        ),
    ),
    (
        "what power loss does to a disk: torn writes (sectors of 512 or 4096 bytes), stale bytes, names not synced",
        (
            ("sim_medium.py", ("write torn by a power loss", "stale bytes behind a power loss")),
            ("sim_disk.py", ("name lost by a power loss",)),
            ("cluster.py", ("write cut short",)),
        ),
    ),
    (
        "disk full: everywhere, on the journal's, on the entry logs', for the index",
        (("nemesis_disks.py", ("disk full", "journal disk full", "data disk full", "index full")),),
    ),
    (
        "errors: a failed sync drops the data, and the next one succeeds",
        (("cluster.py", ("failed sync", "failed read", "failed write of the index", "failed read of the index")),),
    ),
    (
        "flipped bits: in journal and entry logs, on the wire",
        (
            ("nemesis_disks.py", ("bit of an entry log decayed", "bit of a journal decayed")),
            ("sim_wire.py", ("bit flipped on the wire", "bit of an answer flipped")),
        ),
    ),
    (
        "slow disk: works of up to 5 s, of 10 to 30 s, one disk of two",
        (
            ("cluster.py", ("slow disk", "work of a disk takes 10 to 30 s")),
            ("nemesis_disks.py", ("slow journal disk", "slow data disk")),
        ),
    ),
    (
        "lost disk: all, one of two, the index; cookie kept or lost; an old copy put back; a blank one under the old id",
        (
            ("nemesis_disks.py", ("disks lost", "one of two disks lost", "index lost", "disks lost, cookies kept", "cookie lost")),
            ("nemesis_disks.py", ("old disks restored", "blank bookie under an old id")),
        ),
    ),
    (
        "pause of a process, 1 ms to three times a session, at any step",
        (
            (
                "nemesis_machines.py",
                ("bookie paused", "broker paused", "bookie paused before a step", "broker paused before a step"),
            ),
            ("cluster.py", ("paused at a disk operation",)),
        ),
    ),
    (
        "wall clocks: skewed and drifting in every world; set by up to a year, standing, or too fast",
        (("nemesis_machines.py", ("clock set ahead", "clock set back", "clock too fast", "clock too slow")),),
    ),
    (
        "messages of bookies: late (others overtake them), lost with their connection (half-open), doubled, reset around the act",
        (
            ("sim_network.py", ("message late",)),
            ("sim_wire.py", ("message lost", "answer lost", "add message duplicated", "call duplicated", "slow receiver")),
            ("sim_wire.py", ("reset before the server acted", "reset after the server acted")),
        ),
    ),
    (
        "partitions of bookies, slow bookies, several faults in one ensemble",
        (("nemesis_wires.py", ("partition", "partition, one way", "slow bookie", "ensemble hit", "broker cut off, then ended")),),
    ),
    (
        "sockets of clients: resets, half-open, in pieces, slow readers; machines of clients that crash",
        (
            ("sim_transport.py", ("connection half-open", "bytes in pieces")),
            ("sim_transport.py", ("connection reset before the server acted", "connection reset after the server acted")),
            ("nemesis_connections.py", ("client cut off", "client cut off, one way", "connections of a broker reset")),
            ("nemesis_connections.py", ("client does not read", "slow broker", "client crash", "power loss of a client")),
        ),
    ),
    (
        "metadata: sessions that end, unknown outcomes, outages, elections, slow requests",
        (
            ("nemesis_metadata.py", ("metadata session expired", "metadata session of a bookie expired", "metadata outage")),
            ("nemesis_metadata.py", ("metadata connection of a process lost", "metadata leader elected", "slow metadata")),
            ("sim_store.py", ("metadata refused", "metadata answer lost", "metadata connection broken")),
        ),
    ),
    (
        "metadata: stale reads; watches late, merged, missed once",
        (
            ("sim_store.py", ("metadata read of the past", "watch late", "watches merged", "watch missed once")),
            ("nemesis_metadata.py", ("metadata follower behind", "metadata follower of a bookie behind")),
        ),
    ),
    (
        "concurrency: beside brokers that fight in half of the worlds (three in some), several recoverers of one ledger",
        (
            (
                "nemesis_operators.py",
                ("two recover one ledger", "three recover one ledger", "recovered amid late answers"),
            ),
        ),
    ),
    (
        "operations: rolling restarts (of all bookies or all brokers, each round that is completed), quorums changed",
        (
            ("nemesis_operators.py", ("rolling restart of bookies", "rolling restart of bookies, killed", "quorums changed")),
            ("nemesis_operators.py", ("rolling restart of brokers", "rolling restart of brokers, killed")),
        ),
    ),
)


def kinds_by_file() -> Iterator[tuple[str, str]]:
    for _, places in MODEL:
        for file, kinds in places:
            for kind in kinds:
                yield kind, file


KINDS: tuple[str, ...] = tuple(kind for kind, _ in kinds_by_file())


def table() -> str:
    """As Markdown."""
    lines = ["| fault of the model | counted as | dealt out in |", "|---|---|---|"]
    for fault, places in MODEL:
        kinds = " · ".join(kind for _, kinds in places for kind in kinds)
        files = ", ".join(dict.fromkeys(f"`{file}`" for file, _ in places))
        lines.append(f"| {fault} | {kinds} | {files} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
