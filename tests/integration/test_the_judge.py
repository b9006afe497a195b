"""The judge of chaos tests can fail: a cluster whose bookies forget is found out, by what its clients saw and by nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.chaos_cluster import ChaosCluster

pytestmark = pytest.mark.slow

FORGETFUL = """
import sys

if "bookie" in sys.orig_argv:
    from cepheid_bookie import journal_writer

    encode = journal_writer.encode_batch_header

    def nothing_is_written(segment_id, nonce, header):
        return bytes(len(encode(segment_id, nonce, header)))  # no replay takes zeros for a batch

    journal_writer.encode_batch_header = nothing_is_written
"""
"""Python runs it in every process before anything else: bookies say OK, and what they said OK to is gone when they are killed."""


@pytest.fixture
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ChaosCluster]:
    (tmp_path / "sitecustomize.py").write_text(FORGETFUL)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    cluster = ChaosCluster(bookies=3, brokers=1)
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down(keep=False)


def test_bookies_that_forget_what_they_confirmed_are_found_out(forgetful: ChaosCluster) -> None:
    processes = forgetful.processes
    with forgetful.workload("forgotten", types="Shared") as work:
        with work.connections_end("SIGKILL of everything but metadata"):
            for name in ("broker-1", *processes.bookie_ports):
                processes.kill(name)
            for name in (*processes.bookie_ports, "broker-1"):
                processes.start(name)
            work.goes_on()
        with pytest.raises(AssertionError, match="H1: "):
            work.ends_well()
