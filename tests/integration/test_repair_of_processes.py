"""Bad days of automatic repair that only processes have: restarts, decommissioning to the end, and the death of the auditor."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.repair_cluster import VICTIM, LedgerShape, write_ledgers_on
from cepheid_dev.free_ports import free_port
from tests.integration.repairing_cluster import RepairingCluster, repairing_cluster

pytestmark = pytest.mark.slow

COPIED = "cepheid_repair_copied_entries_total"
MENDED = f'cepheid_bookie_mended_blocks_total{{bookie="{VICTIM}"}}'
DAMAGED = f'cepheid_bookie_damaged_blocks{{bookie="{VICTIM}",outlook="repair"}}'
MARKED = "cepheid_repair_marked_ledgers_total"
SMALL = LedgerShape(ledgers=20, entries=10, entry_bytes=100)


def test_a_rolling_restart_of_all_bookies_copies_nothing() -> None:
    with repairing_cluster(bookies=4, brokers=1, grace_s=30.0, walk_interval_s=1.0) as cluster:
        write(cluster, SMALL)
        done = 0.0
        for name in cluster.processes.bookie_ports:
            done += sum(cluster.counters(COPIED, MARKED)[name].values())  # a restart loses them
            cluster.processes.stop(name)
            cluster.processes.start(name)
        cluster.wait_for_walk()
        done += sum(sum(counted.values()) for counted in cluster.counters(COPIED, MARKED).values())
        assert done == 0
        assert VICTIM in cluster.view.bookies_with_entries()


def test_a_bookie_is_decommissioned_to_the_end() -> None:
    with repairing_cluster(bookies=4, brokers=1) as cluster:
        write(cluster, SMALL)
        assert VICTIM in cluster.view.bookies_with_entries()
        cluster.decommission(VICTIM)
        assert VICTIM not in cluster.view.bookies_with_entries()
        assert cluster.has_every_copy()


def test_the_auditor_killed_in_the_middle_of_a_repair_is_replaced_and_the_repair_ends() -> None:
    many = LedgerShape(ledgers=400, entries=10, entry_bytes=100)
    with repairing_cluster(bookies=5, brokers=1, grace_s=60.0, ledgers_at_once=1) as cluster:
        write(cluster, many)
        cluster.processes.kill(VICTIM)
        cluster.chaos.wait_until(lambda: VICTIM not in cluster.chaos.writable(), f"{VICTIM} is not registered")
        cluster.chaos.wait_until(lambda: cluster.status()["auditor"] not in (None, VICTIM), "there is an auditor")
        auditor = cluster.status()["auditor"]
        with ThreadPoolExecutor(1) as commands:  # the repair may be over when the command ends
            recover = commands.submit(cluster.command, "bookies", "recover", VICTIM)
            cluster.chaos.wait_until(lambda: bool(cluster.view.marked_ledgers()), "ledgers are marked")
            cluster.processes.kill(auditor)
            assert cluster.view.marked_ledgers(), "the repair ended before the auditor was killed"
            recover.result()
        cluster.processes.start(auditor)
        cluster.wait_until_unnamed(VICTIM)
        assert cluster.has_every_copy()


def test_a_process_of_its_own_repairs_what_bookies_leave_to_it(tmp_path: Path) -> None:
    config = tmp_path / "autorecovery.toml"
    config.write_text("[recovery]\ngrace_s = 0.0\npoll_s = 0.5\n")
    with repairing_cluster(bookies=4, brokers=1, enabled=False) as cluster:
        write(cluster, SMALL)
        command = [sys.executable, "-m", "cepheid_cli", "autorecovery", "--name", "mender", "--http-port", str(free_port())]
        command += ["--metadata", cluster.processes.metadata_url, "--config", str(config)]
        with subprocess.Popen(command) as mender:
            try:
                cluster.processes.kill(VICTIM)
                cluster.wait_until_unnamed(VICTIM)
                assert cluster.status()["auditor"] == "mender"
                assert cluster.has_every_copy()
            finally:
                mender.terminate()
        assert mender.returncode == 0


def test_a_flipped_bit_is_mended_before_a_reader_meets_it() -> None:
    storage = {"scrub_period_s": 2.0, "checkpoint_interval_s": 0.5}
    with repairing_cluster(bookies=3, brokers=1, storage=storage) as cluster:
        write(cluster, SMALL)
        log = cluster.processes.directory / VICTIM / "data" / "entrylog" / "00000001.log"
        cluster.chaos.wait_until(lambda: log.exists() and log.stat().st_size > 10_000, "entries are in the entry log")
        flip_bit(log, 5000)  # behind the header, in the entries of one of the first ledgers
        cluster.chaos.wait_until(lambda: cluster.counters(MENDED)[VICTIM][MENDED] == 1, "the block is mended")
        assert cluster.counters(DAMAGED)[VICTIM] == {DAMAGED: 0}
        said = cluster.processes.log_path(VICTIM).read_text()
        assert said.count("block.damaged") == said.count("block.mended") == 1, said
        cluster.chaos.wait_until(lambda: not cluster.view.marked_ledgers(), "no ledger is marked")
        assert cluster.has_every_copy()


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))


def write(cluster: RepairingCluster, shape: LedgerShape) -> None:
    write_ledgers_on(cluster.view.url, shape, cluster.chaos.writable())
