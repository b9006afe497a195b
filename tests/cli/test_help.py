"""Every command explains itself: help is made when it is asked for, so that nothing else notices what breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from cepheid_cli.app import app

WIDTH = 1000


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))


def test_all_parts_of_the_command_line_are_looked_at() -> None:
    assert {("init",), ("bookie",), ("broker",), ("dev", "up"), ("ledgers", "verify"), ("bookies", "list")} <= set(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_shows_each_option_and_its_text_as_written(path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", WIDTH)  # it reads the environment once, for whichever test comes first
    shown = CliRunner().invoke(app, [*path, "--help"], env={"TERMINAL_WIDTH": str(WIDTH), "NO_COLOR": "1"})
    assert shown.exit_code == 0, shown.exception
    words = " ".join(shown.output.replace("│", " ").split())
    for parameter in ALL[path].params:
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "option":
            assert all(name in words for name in parameter.opts), parameter.opts
        text = " ".join((getattr(parameter, "help", None) or "").split())
        assert text in words, f"{parameter.name}: {text!r} is shown otherwise:\n{shown.output}"
