"""The language of scenarios: a head that says what it is about, then one step per line, in plain English (scenarios/README.md).

    text ──load──► Scenario(head, lines) ──match──► Step and its arguments ──runner──► what happens on a stage

Rules:
1. A line is understood in exactly one way, or it is an error that names file, line and the nearest pattern.
2. A pattern is literal text with `{kind}` for something named and `(a|b)` for one of several words.
3. What a name stands for is looked up when its line is run: names are bound by the line that makes the thing.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
_HEAD = ("scenario", "course", "bug", "holds", "mutants")
_MAY_LACK = ("bug", "mutants")
_RULE = re.compile(r"(.*\S)\s+\[([A-Z]\d+)\]")


class ScenarioError(Exception):
    """A text that cannot be understood, or that speaks of something that is not there."""


@dataclass(frozen=True, slots=True)
class Line:
    file: str
    number: int
    text: str
    rule: str = ""  # the invariant that is broken if this line turns out wrong

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.text}"


@dataclass(frozen=True, slots=True)
class Scenario:
    stem: str  # of its file: number and name
    title: str
    course: str
    bug: str
    holds: tuple[str, ...]
    mutants: dict[str, tuple[str, ...]]  # name → the rules of which one must notice it
    lines: tuple[Line, ...]

    @property
    def number(self) -> str:
        return self.stem.split("_")[0]


@dataclass(frozen=True, slots=True)
class Kind:
    """What a placeholder stands for. `looks` is a regular expression; `find(scene, text)` gives the thing."""

    name: str
    looks: str
    example: str
    find: Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Step:
    pattern: str
    kinds: tuple[str, ...]
    act: Callable[..., Any]
    regex: re.Pattern[str]

    @property
    def meaning(self) -> str:
        """The first paragraph of its docstring."""
        return " ".join((self.act.__doc__ or "").split("\n\n")[0].split())


KINDS: dict[str, Kind] = {}
STEPS: dict[str, Step] = {}


def kind(name: str, looks: str, example: str) -> Callable[[Callable[[Any, str], Any]], Callable[[Any, str], Any]]:
    """Registers a kind of placeholder; the decorated function finds what a text of it stands for."""

    def register(find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        assert name not in KINDS, f"two kinds are called {name}"
        assert re.compile(looks).groups == 0, f"{name}: groups that capture would count as placeholders"
        KINDS[name] = Kind(name, looks, example, find)
        return find

    return register


def several(looks: str) -> str:
    """A regular expression for a list: "b1", "b1 and b2", "b1, b2 and b3"."""
    return rf"{looks}(?:(?:, | and ){looks})*"


def parts_of(text: str) -> list[str]:
    """Of a list of names."""
    return re.split(r", | and ", text)


def step(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a line that may occur. The function gets the scene and what the placeholders stand for, in their order."""

    def register(act: Callable[..., Any]) -> Callable[..., Any]:
        assert pattern not in STEPS, f"two steps say {pattern!r}"
        kinds = tuple(re.findall(r"\{(\w+)\}", pattern))
        STEPS[pattern] = Step(pattern, kinds, act, re.compile(_regex_of(pattern)))
        return act

    return register


def _regex_of(pattern: str) -> str:
    made = ""
    for piece in re.split(r"(\{\w+\}|\([^()]*\))", pattern):
        if piece.startswith("{"):
            made += f"({KINDS[piece[1:-1]].looks})"
        elif piece.startswith("("):
            made += f"(?:{'|'.join(map(re.escape, piece[1:-1].split('|')))})"
        else:
            made += re.escape(piece)
    return made


def match(line: Line) -> tuple[Step, tuple[str, ...]]:
    """The step that a line says, and the texts of its placeholders. Raises ScenarioError (rule 1)."""
    found = [(step, matched.groups()) for step in STEPS.values() if (matched := step.regex.fullmatch(line.text))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ScenarioError(f"{line}\n  can be read in {len(found)} ways: " + "; ".join(repr(step.pattern) for step, _ in found))
    nearest = difflib.get_close_matches(line.text, STEPS, n=1, cutoff=0.0)
    raise ScenarioError(f"{line}\n  is no step; the nearest is {nearest[0] if nearest else 'none'!r}")


def load(path: Path) -> Scenario:
    """Raises ScenarioError for a head that lacks something. Lines are understood by `match`."""
    head: dict[str, str] = {}
    lines: list[Line] = []
    key, in_head = "", True
    for number, raw in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = raw.split(" #")[0].rstrip()
        if raw.startswith("#") or not (text or in_head):
            continue
        where = f"{path.name}:{number}"
        if not in_head:
            lines.append(_line(path.name, number, text.strip()))
        elif not text:
            in_head = not head
        elif raw[0] == " " and key:
            head[key] += ("\n" if key == "mutants" else " ") + text.strip()
        else:
            key, _, value = text.partition(":")
            if key not in _HEAD or key in head:
                raise ScenarioError(f"{where}: a head has one line each of {', '.join(_HEAD)}, and not {text!r}")
            head[key] = value.strip()
    missing = [key for key in _HEAD if key not in head and key not in _MAY_LACK]
    if missing or not lines:
        raise ScenarioError(f"{path.name}: its head lacks {', '.join(missing) or 'nothing, but it has no steps'}")
    return Scenario(
        path.stem,
        head["scenario"],
        head["course"],
        head.get("bug", ""),
        tuple(head["holds"].replace(",", " ").split()),
        dict(_mutant(path.name, text) for text in re.split(r"[;\n]", head.get("mutants", "")) if text.strip()),
        tuple(lines),
    )


def _line(file: str, number: int, text: str) -> Line:
    ruled = _RULE.fullmatch(text)
    return Line(file, number, *ruled.groups()) if ruled else Line(file, number, text)


def _mutant(file: str, text: str) -> tuple[str, tuple[str, ...]]:
    name, arrow, rules = text.partition("->")
    if not arrow or not rules.strip():
        raise ScenarioError(f"{file}: a mutant is written 'its name -> L5, L10', and not {text!r}")
    return name.strip(), tuple(rules.replace(",", " ").split())


def all_scenarios() -> list[Scenario]:
    """In the order of their files."""
    return [load(path) for path in sorted(FOLDER.glob("*.txt"))]


def scenario_named(name: str) -> Scenario:
    """By number ("04b", "4b") or by the name of its file. Raises ScenarioError."""
    stems = [path.stem for path in sorted(FOLDER.glob("*.txt"))]
    number = re.sub(r"^(?=\d[a-z]?$)", "0", name.rstrip("_"))
    found = [stem for stem in stems if name == stem or number == stem.split("_")[0]]
    if len(found) != 1:
        nearest = difflib.get_close_matches(name, stems, n=3, cutoff=0.0)
        there = ", ".join(stem.split("_")[0] for stem in stems)
        raise ScenarioError(f"no scenario is called {name!r}; near to it are {', '.join(nearest)}; there are {there}")
    return load(FOLDER / f"{found[0]}.txt")
