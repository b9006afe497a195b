"""A bookie that lost its disk, and one whose disk is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cepheid_dev.local_cluster import StartFailedError
from tests.integration.chaos_cluster import ChaosCluster

pytestmark = pytest.mark.slow

MIB = 1 << 20
DISK_MIB = 512
MOUNT = ("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs")


def test_a_bookie_that_lost_its_data_starts_only_when_told_so_and_nothing_is_lost(chaos: ChaosCluster) -> None:
    with chaos.workload("wiped") as work:
        victim = chaos.ensemble(work.topic)[0]
        work.fault("SIGKILL")
        chaos.processes.kill(victim)
        chaos.processes.wipe(victim)
        work.goes_on()
        with pytest.raises(StartFailedError, match="--accept-empty-disk"):
            chaos.processes.start(victim)
        chaos.processes.start(victim, accept_empty_disk=True)
        chaos.wait_until(lambda: victim in chaos.writable(), f"{victim} is registered")
        work.goes_on()
        work.ends_well()


def test_a_bookie_whose_disk_is_full_takes_no_more_and_comes_back_when_there_is_room(chaos: ChaosCluster) -> None:
    victim = "bookie-1"
    with on_a_small_disk(chaos, victim) as disk:
        chaos.wait_until(lambda: victim in chaos.writable(), f"{victim} is registered")
        with chaos.workload("full-disk", topic=chaos.new_topic_on(victim)) as work:
            assert victim in chaos.ensemble(work.topic)
            work.fault("full")
            ballast = disk / "ballast"
            fill(ballast)
            chaos.wait_until(lambda: victim not in chaos.writable(), f"{victim} is read-only")
            assert victim in chaos.view.readonly_bookies()
            work.goes_on(receipts=200)
            chaos.wait_until_replaced(victim, work.topic)
            work.fault("room")
            ballast.unlink()
            chaos.wait_until(lambda: victim in chaos.writable(), f"{victim} is writable again")
            work.goes_on()
            work.ends_well()


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(MIB))
        except OSError:
            pass


def why_not_mounted(directory: Path) -> str:
    """Empty when it works: it takes root, and a container may refuse it all the same."""
    directory.mkdir(exist_ok=True)
    tried = subprocess.run([*MOUNT, str(directory)], capture_output=True, text=True)
    if tried.returncode == 0:
        subprocess.run(["umount", str(directory)], check=True)
    return tried.stderr.strip()


@contextmanager
def on_a_small_disk(chaos: ChaosCluster, name: str) -> Iterator[Path]:
    """The bookie starts anew on a file system of its own; and anew again on what it had."""
    refused = why_not_mounted(chaos.directory / "probe")
    if refused:
        pytest.skip(f"a small disk cannot be mounted here: {refused}")
    chaos.processes.wipe(name)
    directory = chaos.directory / name / "data"
    directory.mkdir()
    subprocess.run([*MOUNT, str(directory)], check=True)
    try:
        chaos.processes.start(name, accept_empty_disk=True)
        yield directory
    finally:
        chaos.processes.kill(name)
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
        chaos.processes.start(name, accept_empty_disk=True)
