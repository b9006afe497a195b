"""The whole fault model is dealt out, under names that README.md lists, and nothing of it lasts beyond healing."""

from __future__ import annotations

import ast
import asyncio
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.faults.kinds import KINDS, kinds_by_file, table
from tests.simulation.faults.machines import MachineFaults
from tests.simulation.faults.nemesis import Nemesis
from tests.simulation.faults.operators import OperatorFaults
from tests.simulation.faults.plan import CALM, FaultPlan, Faults
from tests.simulation.world.cluster import SimBookie
from tests.simulation.world.node import Node
from tests.simulation.world.world import World

HERE = Path(__file__).parent


def _literals(path: Path) -> Iterator[str]:
    """Every text in a file that could be the name of a kind, f-strings with all that they can become."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            texts = [""]
            for part in node.values:
                found = [each.value for each in ast.walk(part) if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                texts = [text + end for text in texts for end in found]
            yield from texts


def test_each_kind_is_dealt_out_where_the_table_says() -> None:
    assert len(set(KINDS)) == len(KINDS)
    for kind, file in kinds_by_file():
        assert kind in set(_literals(HERE / file)), f"{file} deals out no {kind!r}"


def test_each_kind_that_is_dealt_out_is_in_the_table() -> None:
    dealt = [
        text
        for path in sorted(HERE.rglob("*.py"))
        if not path.name.startswith("test_") and path.parent.name != "mutants" and path.name != "kinds.py"
        for text in re.findall(r'(?:deals|strikes|saw)\(\s*"([^"]+)"', path.read_text())
    ]
    assert len(dealt) > 40
    assert set(dealt) <= set(KINDS)


@pytest.mark.page
def test_the_readme_has_the_table() -> None:
    assert table() in (HERE / "README.md").read_text()


def test_a_suppressed_fault_has_an_ordinal_and_does_not_happen() -> None:
    plan = FaultPlan("suppressed", Faults(loss=1.0), suppressed=frozenset({1}))
    assert [plan.strikes("message lost", 1.0) for _ in range(3)] == [True, False, True]
    assert (plan.dealt, plan.counts) == (3, {"message lost": 2})


@pytest.mark.virtual_time
async def test_peace_is_not_before_the_last_lasting_fault_has_ended() -> None:
    plan = FaultPlan("lasting", CALM)
    assert plan.ends_s == 0
    began_s = asyncio.get_running_loop().time()
    assert 10 <= plan.lasting((10, 30)) <= 30
    assert plan.ends_s >= began_s + 10
    ends_s = plan.ends_s
    plan.lasting((0.0, 0.1))
    assert plan.ends_s == ends_s


class Played(World):
    """A world in which one fault is dealt out as often as its visitors come; calm but for it."""

    def __init__(self, act: str, seed: int = 77) -> None:
        super().__init__(seed, faults=CALM, operations=60)
        self.act = act
        self.nemesis: Nemesis | None = None

    async def _live(self) -> None:
        act, play = self.act, self

        class One(Nemesis):
            def __init__(self, world: World) -> None:
                super().__init__(world)
                play.nemesis = self
                self._acts = {each: 1.0 for each in self._acts if f"{type(each.__self__).__name__}.{each.__name__}" == act}  # type: ignore[attr-defined]
                assert self._acts, f"there is no {act}"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.simulation.world.world.Nemesis", One)
            await super()._live()


ACTS = (
    "MachineFaults._crash_at_a_step", "MachineFaults._set_a_clock", "DiskFaults._fill", "MetadataFaults._elect",
    "OperatorFaults._roll_bookies", "OperatorFaults._roll_brokers", "OperatorFaults._change_quorums",
)  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")  # by a process that crashed: see `run_seed`
def test_a_world_gets_over_each_fault_alone_and_nothing_of_it_lasts(act: str) -> None:
    world = Played(act)
    world.run()
    assert world.plan.dealt > 0
    assert not world.tree.out
    assert not world.tree.electing
    assert world.tree.slow == 1.0
    assert not world.network.slow
    for bookie in world.bookies.values():
        assert bookie.serving
        assert not bookie.node.paused
        assert not any(disk.full for disk in bookie.disks)
        assert not bookie.index.full
        assert not bookie.slow_thread


def test_a_strike_that_comes_after_healing_strikes_nobody() -> None:
    world = World(78, faults=CALM, operations=20)
    faults = MachineFaults(world, random.Random(1))
    faults._crash_at_a_step()
    world.plan.heal()
    world.run()
    assert "crash before a step" not in world.plan.counts


@pytest.mark.slow
def test_healing_waits_for_no_start_that_a_crash_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bookie ends right when it serves, before it is registered: the task of its start takes no further step."""
    world, ended, register, heal = World(79, faults=CALM, operations=20), [], SimBookie._register, FaultPlan.heal

    def heal_when_one_is_down(plan: FaultPlan) -> None:
        world.bookies["b1"].crash(power=False)
        heal(plan)

    async def end_instead(bookie: SimBookie, *args: Any) -> None:
        if not world.plan.active and not ended and bookie.id == "b1":
            ended.append(bookie.id)
            bookie.crash(power=False)
            await asyncio.sleep(0)
        await register(bookie, *args)

    monkeypatch.setattr(FaultPlan, "heal", heal_when_one_is_down)
    monkeypatch.setattr(SimBookie, "_register", end_instead)
    world.run()
    assert ended == ["b1"]


@pytest.mark.slow
@pytest.mark.parametrize("orderly", [True, False])
def test_changed_quorums_are_those_of_the_next_ledgers_of_topics_that_clients_use(orderly: bool) -> None:
    world = Played("OperatorFaults._change_quorums", seed=7 if orderly else 3)
    world.run()
    assert world.clients is not None
    assert world.orderly is orderly
    records = [*world.history.ledgers.values(), *world.history.deleted.values()]
    had = {
        (record.ensemble_size, record.write_quorum, record.ack_quorum)
        for record in records
        if "topic" in record.custom and not world.history.creators[record.ledger_id].startswith("auditor")
    }
    assert world.plan.counts["quorums changed"] >= len(had) - 1 > 0


@pytest.mark.slow
@pytest.mark.parametrize("machines", ["bookies", "brokers"])
def test_a_rolling_restart_counts_by_the_rounds_that_were_completed(machines: str) -> None:
    world = Played(f"OperatorFaults._roll_{machines}")
    world.run()
    rounds = sum(count for kind, count in world.plan.counts.items() if kind.startswith(f"rolling restart of {machines}"))
    assert rounds >= 2
    nodes = world.bookies if machines == "bookies" else world.brokers
    assert all(machine.node.incarnation > rounds for machine in nodes.values())


def test_a_round_in_which_one_was_not_restarted_does_not_count() -> None:
    world = World(80, faults=CALM, operations=0)

    async def succeed() -> bool:
        return True

    async def fail() -> bool:
        return False

    async def main() -> None:
        faults = OperatorFaults(world, random.Random(1))
        for kind, restarts in (("whole", [succeed, succeed]), ("in part", [succeed, fail])):
            faults._roll(kind, restarts)
            assert faults.is_rolling
            await faults.end()

    world.play(main())
    assert world.plan.counts == {"whole": 2}


@pytest.mark.slow
def test_who_recover_one_ledger_at_once_are_different_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process would make one recovery of them (`LedgerClient`)."""
    met: list[list[str]] = []
    recover_at_once, spawn = OperatorFaults._recover_at_once, World.spawn

    def note_all(faults: OperatorFaults) -> None:
        met.append([])
        recover_at_once(faults)

    def note_one(world: World, node: Node, work: Any, name: str) -> Any:
        if name.endswith("with others"):
            met[-1].append(node.name)
        return spawn(world, node, work, name)

    monkeypatch.setattr(OperatorFaults, "_recover_at_once", note_all)
    monkeypatch.setattr(World, "spawn", note_one)
    dealt, sizes = 0, set()
    for seed in range(25):
        world = World(seed)
        world.run()
        sizes.add(len(world.brokers))
        dealt += sum(world.plan.counts.get(f"{several} recover one ledger", 0) for several in ("two", "three"))
        if dealt > 1 and sizes == {2, 3}:
            break
    recovered = [names for names in met if names]
    assert sizes == {2, 3}
    assert len(recovered) == dealt > 1
    assert all(len(names) == len(set(names)) > 1 for names in recovered)
