"""One bookie and its disks: fences, checkpoints, what decays, fails, is lost or comes back old."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cepheid_bookie.errors import CookieError, JournalCorruptError, JournalMissingError
from cepheid_bookie.journal_format import ALIGNMENT
from cepheid_ledger.master_key import master_key_of
from cepheid_rpc import ReadAnswer, ReadRequest
from tests.simulation.checks.audit_rest import CHECKPOINT_S, COLLECTED_S, dead_logs, unmarked_batches
from tests.simulation.checks.disk import last_segment
from tests.simulation.checks.storage import check_promises, promises_of
from tests.simulation.scenarios.language import ScenarioError, step
from tests.simulation.scenarios.scene import Scene
from tests.simulation.scenarios.steps.ledgers import OpenLedger
from tests.simulation.scenarios.steps.records import record
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.node import NodeCrashed
from tests.simulation.world.sim_broker import SimBroker
from tests.simulation.world.sim_connection import SimConnections
from tests.simulation.world.sim_disk import SimDisk

_EIO = 5

# -- registrations ------------------------------------------------------------------------------------------------------


@step("{broker} learns that {bookies} (is|are) gone")
def learns_gone(scene: Scene, broker: SimBroker, bookies: Sequence[SimBookie]) -> None:
    """Its directory has found them unregistered for a while, and reports it. It does so again while that lasts."""
    for each in bookies:
        broker.node.context.run(broker.client.on_bookie_gone, each.id)


# -- fencing reads ------------------------------------------------------------------------------------------------------


@step("{broker} reads the first entry of {ledger} from {bookie}, fencing, and gets {payload}")
async def fencing_read_finds(scene: Scene, broker: SimBroker, ledger: OpenLedger, bookie: SimBookie, payload: bytes) -> None:
    """As a recovery reads: the bookie takes no more regular adds of that ledger."""
    answer = await _fencing_read(scene, broker, ledger, bookie)
    found = [bytes(each) for group in answer.groups for each in group.payloads()]
    scene.require(found == [payload], lambda: f"{bookie.id} answers {answer}")


@step("{broker} reads the first entry of {ledger} from {bookie}, fencing, and is denied it")
async def fencing_read_denied(scene: Scene, broker: SimBroker, ledger: OpenLedger, bookie: SimBookie) -> None:
    """A certain no, and the fence with it."""
    answer = await _fencing_read(scene, broker, ledger, bookie)
    denied = not answer.groups and all(missing.status.certain_no for missing in answer.missing)
    scene.require(denied, lambda: f"{bookie.id} answers {answer}")


async def _fencing_read(scene: Scene, broker: SimBroker, ledger: OpenLedger, bookie: SimBookie) -> ReadAnswer:
    connection = SimConnections(scene.network, broker.node).get(bookie.id)
    request = ReadRequest(ledger.id, 0, 0, fence=True, master_key=master_key_of(record(scene, ledger)))

    async def read() -> list[ReadAnswer]:
        return [chunk async for chunk in connection.read(request)]

    (answer,) = await scene.at(broker, read())
    return answer


# -- disks --------------------------------------------------------------------------------------------------------------


@step("the disks of {bookie} take {seconds} for everything")
def slow_disks(scene: Scene, bookie: SimBookie, delay_s: float) -> None:
    """Each write with its sync, each flush, each read of a block."""
    bookie.work_delay_s = delay_s


@step("the journal of {bookie} takes {seconds} for everything")
def slow_journal(scene: Scene, bookie: SimBookie, delay_s: float) -> None:
    """Each work of its thread; the others go on."""
    bookie.slow_thread, bookie.slow_thread_s = "journal", (delay_s, delay_s)


@step("flushes of {bookie} take {seconds}")
def slow_flushes(scene: Scene, bookie: SimBookie, delay_s: float) -> None:
    """Each work of their thread; the journal goes on."""
    bookie.slow_thread, bookie.slow_thread_s = "flush", (delay_s, delay_s)


@step("the disks of {bookie} are full")
def full_disks(scene: Scene, bookie: SimBookie) -> None:
    """What is preallocated may still be written to."""
    bookie.disk.full = True


@step("the disks of {bookie} have room again")
def disks_with_room(scene: Scene, bookie: SimBookie) -> None:
    """The free space is what it was before the disks were full."""
    bookie.disk.full = False


@step("{bookie} takes {number} checkpoints")
async def checkpoints(scene: Scene, bookie: SimBookie, count: int) -> None:
    """Waits until its log mark has moved so often: what the journal holds below it is in entry log and index."""
    for _ in range(count):
        before = _marked(bookie)
        await scene.wait_until(lambda before=before: _marked(bookie) > before, f"{bookie.id} takes a checkpoint")


def _marked(bookie: SimBookie) -> int:
    return 0 if bookie.bookie is None else bookie.bookie.statistics().mark_sequence


@step("the block index of {bookie} fails in the next flush")
def index_fails(scene: Scene, bookie: SimBookie) -> None:
    """An I/O error, once; later flushes would succeed."""
    index_keeps_failing(scene, bookie, times=1)


@step("the block index of {bookie} fails in every flush")
def index_keeps_failing(scene: Scene, bookie: SimBookie, times: int = 1_000) -> None:
    """An I/O error, now and in whatever process comes next."""
    index_recovers(scene, bookie)
    works, failures = bookie.index.before_sync, iter(range(times))

    def before_sync() -> None:
        if next(failures, None) is not None:
            raise OSError(_EIO, "the index cannot be written")
        works()

    bookie.index.before_sync = before_sync


@step("the block index of {bookie} can be written again")
def index_recovers(scene: Scene, bookie: SimBookie) -> None:
    """What is wrong with its disk is over."""
    bookie.index.before_sync = bookie.index._sync  # as it was made


@step("{bookie} crashes before the name of its next journal segment is durable")
def crashes_beginning_a_segment(scene: Scene, bookie: SimBookie) -> None:
    """Its process ends there; whoever comes next sees the segment, and a loss of power may take it."""
    disk = bookie.journal_disk
    on_operation = disk.on_operation
    assert on_operation is not None

    def crash(operation: str, path: str) -> None:
        if (operation, path) == ("sync_dir", "journal"):
            bookie.power_lost = False
            raise NodeCrashed(f"{operation} {path}")
        on_operation(operation, path)

    disk.on_operation = crash  # until the next start


@step("{bookie} stops")
async def stops(scene: Scene, bookie: SimBookie) -> None:
    """Waits until its process has ended by itself."""
    await scene.wait_until(lambda: not bookie.node.alive, f"{bookie.id} stops")


@step("{bookie} starts again, and stops by itself")
async def starts_and_stops(scene: Scene, bookie: SimBookie) -> None:
    """On the disks as they are, before or after it serves."""
    await bookie.start()
    await stops(scene, bookie)


@step("{bookie} has {number} entry (log|logs)")
def has_logs(scene: Scene, bookie: SimBookie, count: int) -> None:
    """On its disks, whatever is in them."""
    found = [path for disk in bookie.disks for path in disk.durable_files() if path.startswith("entrylog/")]
    scene.require(len(found) == count, f"it has {found}")


@step("the block index of {bookie} is full")
def index_full(scene: Scene, bookie: SimBookie) -> None:
    """Its file system has no room; that of the entry logs has."""
    bookie.index.full = True


@step("the block index of {bookie} has room again")
def index_has_room(scene: Scene, bookie: SimBookie) -> None:
    """Somebody made some."""
    bookie.index.full = False


@step("{bookie} has let go of all that it does not need")
async def has_let_go(scene: Scene, bookie: SimBookie) -> None:
    """Within 5 s its log mark is at the end of the journal; within 30 s its index refers to something in every entry log (V6)."""
    await scene.wait_until(
        lambda: not unmarked_batches(bookie), lambda: f"its mark is {unmarked_batches(bookie)} batches behind", CHECKPOINT_S
    )
    await scene.wait_until(lambda: not dead_logs(bookie), lambda: f"nothing refers to {dead_logs(bookie)}", COLLECTED_S)


@step("a bit of {payload} flips in the entry log of {bookie}")
def decays(scene: Scene, payload: bytes, bookie: SimBookie) -> None:
    """On the medium, unnoticed until it is read. No reader has the block in memory."""
    forget_cached_blocks(bookie)
    bookie.disk.flip_bit(*_find_in(bookie.disk, "entrylog", payload, f"{payload!r} is in no entry log of {bookie.id}"))


@step("every reference of {bookie} leads to a whole block, or to one that its medium has damaged")
def references_lead_somewhere(scene: Scene, bookie: SimBookie) -> None:
    """Of its block index, to its entry logs as power loss leaves them (S9)."""
    bookie.checks.scan(bookie.disks, bookie.index)


@step("{bookie} fails to read its entry log once")
def entry_log_fails_once(scene: Scene, bookie: SimBookie) -> None:
    """EIO, the next time. No reader has blocks in memory."""
    forget_cached_blocks(bookie)
    bookie.disk.fail("pread", "entrylog/")


def forget_cached_blocks(bookie: SimBookie) -> None:
    if bookie.bookie is not None:
        bookie.bookie._reader.forget(bookie.bookie.ledgers())


@step("{bookies} (scrubs|scrub)")
def scrubs(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Its scrubber runs from now on. A pass over all blocks takes a second."""
    for each in bookies:
        each.scrub()


@step("{bookie} has mended a block within {seconds}, and none is damaged")
async def mended(scene: Scene, bookie: SimBookie, limit_s: float) -> None:
    """All entries of what was damaged are in other blocks."""

    def is_mended() -> bool:
        assert bookie.bookie is not None
        figures = bookie.bookie.scrubber.figures()
        return figures.mended > 0 and not any(figures.damaged.values())

    await scene.wait_until(is_mended, lambda: f"its scrubber: {bookie.bookie and bookie.bookie.scrubber.figures()}", limit_s)


@step("a bit of {payload} flips in the journal of {bookie}")
def journal_decays(scene: Scene, payload: bytes, bookie: SimBookie) -> None:
    """Likewise."""
    disk = bookie.journal_disk
    disk.flip_bit(*_find_in(disk, "journal", payload, f"{payload!r} is in no journal of {bookie.id}"))


@step("a bit of {payload} flips in the last batch of the journal of {bookie}")
def journal_end_decays(scene: Scene, payload: bytes, bookie: SimBookie) -> None:
    """Nothing behind it proves that it was synced. What else is on its disks counts as lost, too."""
    journal_decays(scene, payload, bookie)
    bookie.count_lost_end_of_journal(f"a bit of {payload!r} flipped")


@step("the journal of {bookie} is cut off at {payload}")
def journal_cut_off(scene: Scene, bookie: SimBookie, payload: bytes) -> None:
    """The file comes back shorter than it was. What else is on its disks counts as lost, too."""
    disk = bookie.journal_disk
    disk.cut_off(*_find_in(disk, "journal", payload, f"{payload!r} is in no journal of {bookie.id}"))
    bookie.count_lost_end_of_journal(f"its journal is cut off at {payload!r}")


def _find_in(disk: SimDisk, folder: str, payload: bytes, otherwise: str) -> tuple[str, int]:
    for path, content in disk.durable_files().items():
        if path.startswith(folder) and disk.exists(path) and payload in content:
            return path, content.index(payload)
    raise ScenarioError(otherwise)


@step("{bookie} starts again, and refuses its damaged journal")
async def refuses_its_journal(scene: Scene, bookie: SimBookie) -> None:
    """It does not serve; its operator is told where the damage is."""
    bookie.may_refuse = True
    await bookie.start()
    scene.require(isinstance(bookie.refused, JournalCorruptError), lambda: f"{bookie!r}, refused {bookie.refused!r}")


@step("{bookie} has a journal segment with batches of its earlier life")
def has_old_batches(scene: Scene, bookie: SimBookie) -> None:
    """The newest one: the log mark had passed that file, and it is written again."""
    path = last_segment(bookie.disks)
    content = b"" if path is None else bookie.journal_disk.durable_content(path)
    ids = {bytes(content[at + 8 : at + 16]) for at in range(ALIGNMENT, len(content), ALIGNMENT) if content[at : at + 4] == b"CPB1"}
    scene.require(len(ids) == 2, lambda: f"{path} has batches of segments {sorted(ids)}")


@step("the files of the journal of {bookie} are deleted")
def journal_files_deleted(scene: Scene, bookie: SimBookie) -> None:
    """While it is down. Whoever deleted them can bring them back, and does so when the bookie asks for them."""
    bookie.lose_journal_files()


@step("{bookie} starts again, and misses its journal")
async def misses_its_journal(scene: Scene, bookie: SimBookie) -> None:
    """It does not serve, and names the file that it needs."""
    await bookie.start()
    scene.require(isinstance(bookie.refused, JournalMissingError), lambda: f"{bookie!r}, refused {bookie.refused!r}")


@step("{bookie} starts again, and is refused because a ledger names it")
async def refused_while_named(scene: Scene, bookie: SimBookie) -> None:
    """It was decommissioned, and its data is still needed."""
    bookie.may_refuse, bookie.refused = True, None
    await bookie.start()
    bookie.may_refuse = False
    needed = isinstance(bookie.refused, CookieError) and "but ledgers name it" in str(bookie.refused)
    scene.require(needed, lambda: f"{bookie!r}, refused {bookie.refused!r}")


@step("{bookies} (comes|come) back on empty disks")
async def blank(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Rebuilt under the old id, and the operator says that the data is gone (--accept-empty-disk)."""
    for each in bookies:
        each.lose_disk()
        await each.start()


@step("{bookies} (reads|read) metadata as it was {seconds} ago")
def reads_the_past(scene: Scene, bookies: Sequence[SimBookie], lag_s: float) -> None:
    """From followers that are so far behind; each sees its own writes, and asks to be brought up to date where it must."""
    for each in bookies:
        assert each.store is not None
        each.store.lag_s = lag_s


@step("a copy is made of the disks of {bookie}")
def copy_disks(scene: Scene, bookie: SimBookie) -> None:
    """A snapshot."""
    bookie.keep_copy()


@step("the copy of {bookie} becomes an old one")
async def copy_ages(scene: Scene, bookie: SimBookie) -> None:
    """Waits until the bookie has told metadata that it lived on (it does now and then)."""
    await scene.wait_until(lambda: bookie.has_old_copy, "metadata hears that it lives")


@step("{bookie} comes back on its copy")
async def comes_back_old(scene: Scene, bookie: SimBookie) -> None:
    """Instead of its disks, and nobody knows."""
    bookie.restore_copy()
    bookie.may_refuse = True
    await bookie.start()


@step("{bookie} comes back on its copy, as its operator knows")
async def comes_back_old_knowingly(scene: Scene, bookie: SimBookie) -> None:
    """The operator says that what is missing is gone (--accept-empty-disk)."""
    bookie.accepts_empty_disk = True
    await comes_back_old(scene, bookie)


@step("{bookie} refuses to start")
def refuses(scene: Scene, bookie: SimBookie) -> None:
    """Its disks are not the ones that it left."""
    scene.require(isinstance(bookie.refused, CookieError) and not bookie.serving, f"{bookie!r}, refused {bookie.refused!r}")


@step("{bookies} (serves|serve)")
def serves(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """It started, and answers."""
    for each in bookies:
        scene.require(each.serving, f"{each!r}, refused {each.refused!r}")


@step("{bookies} (has|have) everything that was promised")
async def keeps_promises(scene: Scene, bookies: Sequence[SimBookie]) -> None:
    """Every entry answered OK can be read with its bytes, but for what was lost with its disks or lies in a log that decayed;
    every fence refuses an add (S2, S3, S8)."""
    for each in bookies:
        serves(scene, [each])
        served: Any = each.bookie
        promises = promises_of(scene.history.bookie(each.id))
        await check_promises(each.id, each.id, served, scene.history, promises, each.has_decayed)
