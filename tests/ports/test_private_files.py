"""Who may read what a process keeps: modes of new files and of those that an older release created."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cepheid_ports import make_new_files_private, make_private


def modes(directory: Path) -> dict[str, str]:
    return {str(path.relative_to(directory)): f"{path.lstat().st_mode & 0o7777:o}" for path in sorted(directory.rglob("*"))}


@pytest.fixture
def old_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("old_umask")
def test_others_can_read_nothing_that_is_created() -> None:
    make_new_files_private()
    assert os.umask(0o077) == 0o027
    make_new_files_private()
    assert os.umask(0o022) == 0o077  # a stricter one stays


def test_what_others_could_read_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    for path, mode in (("index/1.sst", 0o644), ("index/LOG", 0o777), ("VERSION", 0o600)):
        (tmp_path / path).touch()
        (tmp_path / path).chmod(mode)
    (tmp_path / "index").chmod(0o2777)
    tmp_path.chmod(0o755)
    make_private(tmp_path)
    assert modes(tmp_path) == {"VERSION": "600", "index": "2750", "index/1.sst": "640", "index/LOG": "640"}
    assert tmp_path.stat().st_mode & 0o777 == 0o750


@pytest.mark.usefixtures("old_umask")  # an earlier test may have opened a role in this process, which tightens it
def test_files_of_others_and_what_links_lead_to_stay_as_they_are(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    for directory in (ours, ours / "index", ours / "photos", other):
        directory.mkdir(0o755)
    for file in (ours / "index" / "LOG", ours / "photos" / "cat", other / "file"):
        file.touch(0o644)
    (ours / "index" / "link").symlink_to(other / "file")
    tmp_path.chmod(0o1777)
    make_private(ours, ("index",))
    make_private(tmp_path, ())
    found = modes(tmp_path)
    assert {found["ours/photos/cat"], found["other/file"]} == {"644"}
    assert (found["ours/index/LOG"], found["ours"]) == ("640", "750")
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777  # a directory of all users


@pytest.mark.usefixtures("old_umask")
def test_a_mode_that_cannot_be_changed_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).touch(0o644)

    def refused(path: str, mode: int) -> None:
        raise PermissionError(1, "Operation not permitted", path)

    monkeypatch.setattr(os, "chmod", refused)
    make_private(tmp_path)
    assert [record.message for record in caplog.records] == ["files.not_private"]
