"""`cepheid schemas` as a user types it, against a server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from cepheid_cli.app import app
from cepheid_ports import CepheidError
from tests.admin.admin_world import AdminWorld, running_admin
from tests.schemas.schema_examples import field, record

ID = record(field("id", "long"))
ID_TEXT = record(field("id", "string"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminWorld]:
    with running_admin(tmp_path_factory.mktemp("schemas") / "data") as world:
        yield world


def run(world: AdminWorld, *words: str, stdin: str | None = None) -> Result:
    arguments = ["schemas", *words, "--admin-url", world.standalone.admin_url]
    result = world.in_thread(lambda: CliRunner().invoke(app, arguments, input=stdin))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.mark.slow
def test_a_schema_is_uploaded_listed_shown_checked_and_deleted(world: AdminWorld, tmp_path: Path) -> None:
    file = tmp_path / "id.avsc"
    file.write_text(json.dumps(ID))
    made = run(world, "upload", "orders-eu", str(file), "--property", "team=a")
    assert (made.exit_code, made.stderr) == (0, "topic orders-eu has it as version 0\n")
    assert json.loads(run(world, "get", "orders-eu").stdout) == ID
    assert json.loads(run(world, "get", "orders-eu", "--version", "0", "--json").stdout)["properties"] == {"team": "a"}
    assert run(world, "versions", "orders-eu").stdout.splitlines()[1].split()[:2] == ["0", "AVRO"]
    assert run(world, "check", "orders-eu", str(file)).stdout == "compatible (FULL)\n"
    clash = run(world, "check", "orders-eu", "-", stdin=json.dumps(ID_TEXT))
    assert clash.exit_code == 1
    assert "field 'id': the new schema has string, version 0 has long" in clash.stdout
    with pytest.raises(CepheidError, match=r"field 'id'.*409"):
        run(world, "upload", "orders-eu", "-", stdin=json.dumps(ID_TEXT))
    assert run(world, "delete", "orders-eu").exit_code == 0
    with pytest.raises(CepheidError, match="has no schema"):
        run(world, "get", "orders-eu")


def test_types_without_a_definition_and_names_with_escapes(world: AdminWorld) -> None:
    name = "public/default/100%+x"
    assert run(world, "upload", name, "--type", "string").exit_code == 0
    assert json.loads(run(world, "get", name, "--json").stdout)["type"] == "STRING"
    with pytest.raises(CepheidError, match="NAME=VALUE"):
        run(world, "upload", name, "--type", "string", "--property", "x")
