"""The same work on many jobs, in as many processes as there are cores to give.

    jobs ──► whoever is idle ──► work(job) in a process ──► (job, answer), in the order of their ends

Plain processes that share nothing, so that a seed means the same in each of them. One that ends in the middle of a job costs
that job alone.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from tests.simulation.seeds import collect_worlds_only

J = TypeVar("J")
A = TypeVar("A")


class ProcessEnded(Exception):
    """Instead of an answer: the process that had the job is gone."""


def run_jobs(work: Callable[[J], A], jobs: Sequence[J], *, cores: int) -> Iterator[tuple[J, A | ProcessEnded]]:
    """With one core: in this process. `work` is a function of a module, jobs and answers can be pickled."""
    if cores <= 1:
        collect_worlds_only()
        yield from ((job, work(job)) for job in jobs)
        return
    waiting = iter(jobs)
    busy: dict[Connection, tuple[BaseProcess, J]] = {}
    try:
        for job in [job for _, job in zip(range(cores), waiting, strict=False)]:
            _hand_out(job, busy, *_start(work))
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                process, job = busy.pop(connection)
                try:
                    yield job, connection.recv()
                except EOFError:
                    process.join()
                    yield job, ProcessEnded(f"the process that ran {job!r} ended with exit code {process.exitcode}")
                    connection, process = _start(work)
                for following in waiting:
                    _hand_out(following, busy, connection, process)
                    break
                else:
                    _stop(connection, process)
    finally:
        for connection, (process, _) in busy.items():
            process.terminate()
            _stop(connection, process)


def _start(work: Callable[[J], A]) -> tuple[Connection, BaseProcess]:
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever runs here
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(work, theirs), daemon=True)
    process.start()
    theirs.close()  # here: so that the end of the process is the end of the pipe
    return ours, process


def _hand_out(job: J, busy: dict[Connection, tuple[BaseProcess, J]], connection: Connection, process: BaseProcess) -> None:
    busy[connection] = process, job
    connection.send(job)


def _stop(connection: Connection, process: BaseProcess) -> None:
    connection.close()
    process.join()


def _serve(work: Callable[[J], A], connection: Connection) -> None:
    collect_worlds_only()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send(work(job))
