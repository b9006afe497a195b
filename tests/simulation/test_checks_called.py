"""A check that nobody calls always holds: every check function and method of the simulator is named somewhere besides its
definition."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
_OF_CHECKS = FOLDER / "checks"
"""In these modules every function counts as a check, as does every method of a class whose name ends in one of these:"""
_CHECKERS = ("Checks", "Probe")


def test_every_check_is_called_by_something() -> None:
    trees = {path: ast.parse(path.read_text()) for path in sorted(FOLDER.rglob("*.py")) if not path.name.startswith("test_")}
    found = [name for path, tree in trees.items() for name in checks_of(path, tree)]
    assert {"topic.TopicRecordChecks._check_terminated", "topic.check_opened", "audit.audit"} <= set(found)
    assert never_named(found, list(trees.values())) == []


def checks_of(path: Path, tree: ast.Module) -> Iterator[str]:
    """Their names as module.function or module.Class.method."""
    stem, is_of_checks = path.stem, path.parent == _OF_CHECKS
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (is_of_checks or _is_check(node.name)):
            yield f"{stem}.{node.name}"
        if isinstance(node, ast.ClassDef):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    # a probe's public methods are called by what it observes, under the names of what it stands for
                    is_own = node.name.endswith(_CHECKERS[0]) or (node.name.endswith(_CHECKERS) and method.name.startswith("_"))
                    if (is_own or _is_check(method.name)) and not method.name.startswith("__"):
                        yield f"{stem}.{node.name}.{method.name}"


def _is_check(name: str) -> bool:
    return name.lstrip("_").split("_")[0] in ("check", "inspect", "judge")


def never_named(checks: Sequence[str], trees: Sequence[ast.Module]) -> list[str]:
    named = {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named |= {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return [check for check in checks if check.rpartition(".")[2] not in named]


def test_a_method_that_is_only_defined_is_found() -> None:
    methods = ["on_chain(self): self._check_age()", "_check_age(self): ...", "_rest(self): ..."]
    tree = ast.parse("class TopicChecks:\n" + "".join(f"  def {method}\n" for method in methods))
    checks = list(checks_of(Path("topics.py"), tree))
    assert checks == ["topics.TopicChecks.on_chain", "topics.TopicChecks._check_age", "topics.TopicChecks._rest"]
    assert never_named(checks, [tree]) == ["topics.TopicChecks.on_chain", "topics.TopicChecks._rest"]
