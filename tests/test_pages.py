"""Pages and docstrings name only files that exist, and the READMEs of the broker's parts name every module."""

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


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*readmes(), *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    missing = [
        f"{page}: {target}" for page in pages for target in LINK.findall(page.read_text()) if not (page.parent / target).exists()
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
