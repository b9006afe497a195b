"""A seed means the same on two machines: what one of them kept in digests.json, whichever runs this compares with."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import digests
from tests.simulation.digests import NOTHING_TO_COMPARE, SEEDS, WRITE, Digests, Place, load, save, verdict
from tests.simulation.mutants.catalogue import MUTANTS
from tests.simulation.mutants.medians import code_of_seeds, codes_of
from tests.simulation.seeds import run_seed

REPOSITORY = Path(__file__).parents[2]
HERE = Place("c0de", "Linux-6.1-x86_64", "3.11.2", {"protobuf": "6.1"})
THERE = dataclasses.replace(HERE, platform="macOS-15-arm64", python="3.11.9")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_seeds_mean_here_what_they_meant_where_the_digests_were_written() -> None:
    command = [sys.executable, "-m", "tests.simulation.digests"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if result.returncode == NOTHING_TO_COMPARE:
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_file_has_each_seed_and_says_where_it_was_written() -> None:
    kept = load()
    assert list(kept.of_seeds) == list(SEEDS)
    assert len(set(kept.of_seeds.values())) == len(SEEDS)
    assert all(dataclasses.astuple(kept.seen))


def test_another_system_and_patch_level_have_to_agree() -> None:
    kept = Digests(THERE, {0: "a", 1: "b"})
    assert THERE.why_not_the_same(HERE) == ""
    assert verdict(kept, Digests(HERE, {0: "a", 1: "b"}))[0] == 0
    code, said = verdict(kept, Digests(HERE, {0: "a", 1: "c"}))
    assert code == 1
    assert "seeds [1] have other traces here, on Linux-6.1-x86_64, than on macOS-15-arm64" in said
    assert verdict(kept, Digests(HERE, {0: "a"}))[0] == 1


def test_other_code_and_another_python_are_nothing_to_compare_with() -> None:
    assert "of code c0de, and this is f00d" in HERE.why_not_the_same(dataclasses.replace(HERE, code="f00d"))
    assert "of Python 3.11.2, and this is 3.12.2" in HERE.why_not_the_same(dataclasses.replace(HERE, python="3.12.2"))


def test_other_packages_excuse_other_traces_and_are_named() -> None:
    elsewhere = dataclasses.replace(THERE, packages={"protobuf": "7.0", "uvloop": "1"})
    assert verdict(Digests(elsewhere, {0: "a"}), Digests(HERE, {0: "a"}))[0] == 0
    code, said = verdict(Digests(elsewhere, {0: "a"}), Digests(HERE, {0: "b"}))
    assert code == NOTHING_TO_COMPARE
    assert "protobuf 7.0 and 6.1, uvloop 1 and None" in said
    assert WRITE in said


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    kept = Digests(HERE, {0: "a", 10: "b"})
    save(kept, tmp_path / "digests.json")
    assert load(tmp_path / "digests.json") == kept


@pytest.mark.slow
def test_a_digest_is_of_the_whole_trace() -> None:
    outcome = run_seed(3, trace=True)
    assert digests.digest_of(3) == outcome.digest()
    assert dataclasses.replace(outcome, trace=outcome.trace[:-1]).digest() != outcome.digest()


def test_the_code_of_seeds_is_no_mutants_and_not_of_what_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    code = code_of_seeds()
    assert code not in codes_of(MUTANTS).values()
    monkeypatch.delitem(sys.modules, "tests.simulation.digests")
    assert code_of_seeds() == code
    monkeypatch.delitem(sys.modules, "tests.simulation.world.world")
    assert code_of_seeds() != code
