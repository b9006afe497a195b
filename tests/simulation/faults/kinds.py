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
                "faults/machines.py",
                ("power loss", "power loss everywhere", "power loss of a broker", "bookie crash", "broker crash"),
            ),
            ("faults/machines.py", ("power loss before a step", "crash before a step", "broker crash before a step")),
            ("world/cluster.py", ("crash at a disk operation",)),
            ("workloads/operators.py", ("broker crash in a drain",)),
        ),
    ),
    (
        "what power loss does to a disk: torn writes (sectors of 512 or 4096 bytes), stale bytes, names not synced",
        (
            ("world/sim_medium.py", ("write torn by a power loss", "stale bytes behind a power loss")),
            ("world/sim_disk.py", ("name lost by a power loss",)),
            ("world/cluster.py", ("write cut short",)),
        ),
    ),
    (
        "disk full: everywhere, on the journal's, on the entry logs', for the index, on most bookies at once",
        (("faults/disks.py", ("disk full", "journal disk full", "data disk full", "index full", "disks of most bookies full")),),
    ),
    (
        "errors: a failed sync drops the data, and the next one succeeds",
        (("world/cluster.py", ("failed sync", "failed read", "failed write of the index", "failed read of the index")),),
    ),
    (
        "flipped bits: in journal and entry logs, on the wire; a journal that was cut off",
        (
            ("faults/disks.py", ("bit of an entry log decayed", "bit of a journal decayed")),
            ("faults/disks.py", ("bit of the end of a journal decayed", "end of a journal cut off")),
            ("world/sim_wire.py", ("bit flipped on the wire", "bit of an answer flipped")),
        ),
    ),
    (
        "slow disk: works of up to 5 s, of 10 to 30 s, one disk of two",
        (
            ("world/cluster.py", ("slow disk", "work of a disk takes 10 to 30 s")),
            ("faults/disks.py", ("slow journal disk", "slow data disk")),
        ),
    ),
    (
        "lost disk: all, one of two, the index; cookie kept or lost; an old copy put back; a blank one under the old id",
        (
            ("faults/disks.py", ("disks lost", "one of two disks lost", "index lost", "disks lost, cookies kept", "cookie lost")),
            ("faults/disks.py", ("old disks restored", "blank bookie under an old id")),
        ),
    ),
    (
        "pause of a process, 1 ms to three times a session, at any step",
        (
            (
                "faults/machines.py",
                ("bookie paused", "broker paused", "bookie paused before a step", "broker paused before a step"),
            ),
            ("world/cluster.py", ("paused at a disk operation",)),
        ),
    ),
    (
        "wall clocks: skewed and drifting in every world; set by up to a year, standing, or too fast",
        (("faults/machines.py", ("clock set ahead", "clock set back", "clock too fast", "clock too slow")),),
    ),
    (
        "messages of bookies: late (others overtake them), lost with their connection (half-open), doubled, reset around the act",
        (
            ("world/sim_network.py", ("message late",)),
            ("world/sim_wire.py", ("message lost", "answer lost", "add message duplicated", "call duplicated", "slow receiver")),
            ("world/sim_wire.py", ("reset before the server acted", "reset after the server acted")),
        ),
    ),
    (
        "partitions of bookies, slow bookies, several faults in one ensemble",
        (("faults/wires.py", ("partition", "partition, one way", "slow bookie", "ensemble hit", "broker cut off, then ended")),),
    ),
    (
        "sockets of clients: resets, half-open, in pieces, slow readers; machines of clients that crash",
        (
            ("world/sim_transport.py", ("connection half-open", "bytes in pieces")),
            ("world/sim_transport.py", ("connection reset before the server acted", "connection reset after the server acted")),
            ("faults/connections.py", ("client cut off", "client cut off, one way", "connections of a broker reset")),
            ("world/sim_peers.py", ("call between brokers late", "call between brokers lost")),
            ("faults/connections.py", ("client does not read", "slow broker", "client crash", "power loss of a client")),
        ),
    ),
    (
        "metadata: sessions that end, unknown outcomes, outages, elections, slow requests",
        (
            ("faults/metadata.py", ("metadata session expired", "metadata session of a bookie expired", "metadata outage")),
            ("faults/metadata.py", ("metadata connection of a process lost", "metadata leader elected", "slow metadata")),
            ("world/sim_store.py", ("metadata refused", "metadata answer lost", "metadata connection broken")),
        ),
    ),
    (
        "metadata: stale reads; watches late, merged, missed once",
        (
            ("world/sim_store.py", ("metadata read of the past", "watch late", "watches merged", "watch missed once")),
            ("faults/metadata.py", ("metadata follower behind", "metadata follower of a bookie behind")),
        ),
    ),
    (
        "object stores: slow, refusing, answers lost, half of an object kept; in the worlds that offload ledgers",
        (
            ("world/sim_objects.py", ("slow object store", "object store refused")),
            ("world/sim_objects.py", ("answer of the object store lost", "half an object kept")),
        ),
    ),
    (
        "concurrency: beside brokers that fight in half of the worlds (three in some), several recoverers of one ledger",
        (
            (
                "faults/operators.py",
                ("two recover one ledger", "three recover one ledger", "recovered amid late answers"),
            ),
        ),
    ),
    (
        "operations: rolling restarts (of all bookies or all brokers, each round that is completed), quorums changed",
        (
            ("faults/operators.py", ("rolling restart of bookies", "rolling restart of bookies, killed", "quorums changed")),
            ("faults/operators.py", ("rolling restart of brokers", "rolling restart of brokers, killed")),
        ),
    ),
    (
        "repair: bookies that are gone for good, disks that are filled again, decommissions, orders of operators",
        (
            ("faults/repair.py", ("bookie lost for good", "disks lost, to be filled again", "bookie decommissioned")),
            ("faults/repair.py", ("repair switched off", "recovery of a bookie requested")),
        ),
    ),
    (
        "processes that repair: crash, pause (two auditors for a moment), lost session, partition, stale metadata",
        (
            ("faults/repair.py", ("process that repairs crashed", "process that repairs paused")),
            ("faults/repair.py", ("session of a process that repairs expired", "process that repairs cut off from a bookie")),
            ("faults/repair.py", ("metadata follower of a process that repairs behind",)),
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
