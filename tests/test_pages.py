"""Pages and docstrings name only files and commands that exist, and the pages that list others list all of them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.test_source_rules import FOLDERS, ROOT

pytestmark = pytest.mark.page

MODULE = re.compile(r"[\w*./-]*[\w*]\.py\b")
"""A module as pages name it: `frames.py`, `protocol/connection_*.py`, `core/cepheid_wire/frames.py`."""
LINK = re.compile(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`(\.?\w[\w.*/-]*)`")
"""A word of code, which is a path if it has a slash or the ending of a module."""
MAKE = re.compile(r"(?:`|^|\$ )make ([a-z][a-z-]*)", re.MULTILINE)
RUN = re.compile(r"python -m ((?:tests|benchmarks|cepheid_\w+)(?:\.\w+)*)")
LISTED = ("broker_service/cepheid_managed_ledger", "broker_service/cepheid_broker/*")
"""Packages whose README lists all of their modules."""


@functools.cache
def modules() -> frozenset[str]:
    """Paths from the root, with a slash in front."""
    return frozenset(f"/{path.relative_to(ROOT)}" for path in ROOT.glob("[!.]*/**/*.py"))


@functools.cache
def readmes() -> Mapping[Path, str]:
    return {path: path.read_text() for folder in FOLDERS for path in sorted((ROOT / folder).rglob("README.md"))}


@functools.cache
def exists(name: str, folder: str = "") -> bool:
    """Some module below this folder has this name, or this end of its path."""
    below = (path for path in modules() if path.startswith(f"{folder}/"))
    return any(fnmatch(path, f"*/{name}") if "*" in name else path.endswith(f"/{name}") for path in below)


def test_architecture_names_modules_that_exist() -> None:
    assert [name for name in MODULE.findall((ROOT / "ARCHITECTURE.md").read_text()) if not exists(name)] == []


def test_the_product_names_modules_that_exist() -> None:
    missing = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            missing += [f"{path}: {name}" for name in MODULE.findall(path.read_text()) if not exists(name)]
    assert not missing


def test_a_readme_names_modules_of_its_own_folder_or_by_their_path() -> None:
    missing = []
    for page, text in readmes().items():
        for name in MODULE.findall(text):
            is_told_where = "/" in name or name.startswith("test_")
            if not exists(name, "" if is_told_where else f"/{page.parent.relative_to(ROOT)}"):
                missing.append(f"{page}: {name}")
    assert not missing


def pages() -> list[Path]:
    return [*readmes(), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tests/**/README.md")]


def test_links_between_pages_lead_somewhere() -> None:
    missing = [
        f"{page}: {target}" for page in pages() for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
    ]
    assert not missing


def test_a_readme_lists_every_module_of_its_package() -> None:
    missing = []
    for package in (path.parent for pattern in LISTED for path in sorted(ROOT.glob(f"{pattern}/__init__.py"))):
        named = set(MODULE.findall((package / "README.md").read_text()))
        missing += [
            f"{package.name}: {path.name}" for path in sorted(package.glob("*.py")) if path.name not in {*named, "__init__.py"}
        ]
    assert not missing


def test_contributors_are_told_of_files_that_exist() -> None:
    """CONTRIBUTING.md writes paths from the root."""
    named = [name for name in PATH.findall((ROOT / "CONTRIBUTING.md").read_text()) if "/" in name or MODULE.fullmatch(name)]
    assert len(named) > 30
    assert [name for name in named if not any(ROOT.glob(name)) and not exists(name)] == []


def test_commands_on_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for page in pages():
        text = page.read_text()
        missing += [f"{page}: make {name}" for name in MAKE.findall(text) if name not in targets]
        missing += [f"{page}: python -m {name}" for name in RUN.findall(text) if not is_runnable(name)]
    assert not missing


def is_runnable(name: str) -> bool:
    path = name.replace(".", "/")
    return exists(f"{path}.py") or exists(f"{path}/__main__.py")


def test_the_index_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    listed = [docs / target for target in LINK.findall((docs / "index.md").read_text())]
    there = sorted(page for page in docs.rglob("*.md") if page.name != "index.md")
    assert sorted(page for page in listed if docs in page.resolve().parents) == there
