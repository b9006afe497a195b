"""Whether seeds mean here what they meant on another machine: a digest of the trace of each of a few, kept in `digests.json`.

python -m tests.simulation.digests            runs them and compares: ends with 0, 1 (another trace), or 3 (nothing to compare with)
python -m tests.simulation.digests --write    keeps what this machine saw, with its name and a hash of the code that ran

The test runs the first of these on whatever machine it is, in a process of its own: what else is loaded counts as code.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.simulation.mutants.medians import code_of_seeds
from tests.simulation.processes import ProcessEnded, run_jobs
from tests.simulation.seeds import run_seed

FILE = Path(__file__).with_name("digests.json")
SEEDS = range(20)
WRITE = "python -m tests.simulation.digests --write"
NOTHING_TO_COMPARE = 3


@dataclass(frozen=True, slots=True)
class Place:
    """What a trace is of, and where it was seen."""

    code: str
    platform: str
    python: str
    packages: dict[str, str]  # of others that were loaded: with their versions

    def why_not_the_same(self, other: Place) -> str:
        """Empty: the same seed is the same trace at both."""
        if self.code != other.code:
            return f"of code {self.code}, and this is {other.code}"
        if _minor(self.python) != _minor(other.python):
            return f"of Python {self.python}, and this is {other.python}: another minor version is another course"
        return ""

    def unlike_packages(self, other: Place) -> str:
        names = sorted(self.packages.keys() | other.packages.keys())
        pairs = [(name, self.packages.get(name), other.packages.get(name)) for name in names]
        return ", ".join(f"{name} {here} and {there}" for name, here, there in pairs if here != there)


@dataclass(frozen=True, slots=True)
class Digests:
    seen: Place
    of_seeds: dict[int, str]

    def unlike(self, here: Digests) -> list[int]:
        return [seed for seed, digest in self.of_seeds.items() if here.of_seeds.get(seed) != digest]


def this_place() -> Place:
    """Before seeds run: what these load besides is no code of another kind."""
    by_module = importlib.metadata.packages_distributions()
    loaded = {name.partition(".")[0] for name in list(sys.modules)}
    others = {package for name in loaded for package in by_module.get(name, ())} - {"cepheid"}  # ours is hashed
    packages = {package: importlib.metadata.version(package) for package in sorted(others)}
    return Place(code_of_seeds(), platform.platform(), platform.python_version(), packages)


def digests_here(place: Place, cores: int) -> Digests:
    """Raises ProcessEnded."""
    found: dict[int, str] = {}
    for seed, digest in run_jobs(digest_of, list(SEEDS), cores=cores):
        if isinstance(digest, ProcessEnded):
            raise digest
        found[seed] = digest
    return Digests(place, dict(sorted(found.items())))


def digest_of(seed: int) -> str:
    """Of a seed that fails too: it fails alike everywhere."""
    return run_seed(seed, trace=True).digest()


def load(file: Path = FILE) -> Digests:
    kept = json.loads(file.read_text(encoding="utf-8"))
    return Digests(Place(**kept["seen"]), {int(seed): digest for seed, digest in kept["of_seeds"].items()})


def save(digests: Digests, file: Path = FILE) -> None:
    file.write_text(json.dumps(asdict(digests), indent=2) + "\n", encoding="utf-8")


def verdict(kept: Digests, here: Digests) -> tuple[int, str]:
    """Of two that are of the same code and Python."""
    if not (unlike := kept.unlike(here)):
        return 0, f"{len(here.of_seeds)} seeds: the same traces here, on {here.seen.platform}, as on {kept.seen.platform}"
    where = f"seeds {unlike} have other traces here, on {here.seen.platform}, than on {kept.seen.platform}"
    if packages := kept.seen.unlike_packages(here.seen):
        return NOTHING_TO_COMPARE, f"{where}, but packages are others too: {packages}. Here: {WRITE}"
    return 1, f"{where}, with the same code and packages: something that is not of the seed decides"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.digests", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="keep what this machine sees, in digests.json")
    parser.add_argument("--cores", type=int, default=1, help="in so many processes (1)")
    arguments = parser.parse_args()
    place = this_place()
    if arguments.write:
        save(digests_here(place, arguments.cores))
        print(f"{FILE.name}: {len(SEEDS)} seeds, code {place.code}, {place.platform}, Python {place.python}")
        return 0
    kept = load()
    if why := kept.seen.why_not_the_same(place):
        print(f"{FILE.name} is {why}. To keep what they mean now: {WRITE}")
        return NOTHING_TO_COMPARE
    code, said = verdict(kept, digests_here(place, arguments.cores))
    print(said)
    return code


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


if __name__ == "__main__":
    sys.exit(main())
