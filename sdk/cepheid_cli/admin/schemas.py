"""`cepheid schemas`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminClient, AdminUrl, Json, Topic, done, print_json, print_table, sub_app
from cepheid_cli.admin.units import pairs, shown_time
from cepheid_cli.admin_client import quoted
from cepheid_wire import TopicName

app = sub_app("schemas", "Schemas of topics: their versions, and what may follow (docs/schemas.md).")

Definition = Annotated[
    typer.FileText | None, typer.Argument(help="File with the definition; - is standard input; none for STRING …")
]
Type = Annotated[str, typer.Option("--type", help="AVRO, JSON, PROTOBUF_NATIVE, KEY_VALUE, STRING, INT32 …")]
Properties = Annotated[list[str] | None, typer.Option("--property", help="NAME=VALUE; repeat it.")]


@app.command()
def get(
    topic: Topic,
    version: Annotated[int | None, typer.Option(help="Default: the latest.")] = None,
    as_json: Json = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print the definition of a topic's schema."""
    one = "" if version is None else f"/{version}"
    found = AdminClient(admin_url).get(f"{_path(topic)}/schema{one}")
    if as_json:
        print_json(found)
    else:
        print(found["data"])


@app.command()
def versions(topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List the versions in force, oldest first."""
    found = AdminClient(admin_url).get(f"{_path(topic)}/schemas")["getSchemaResponses"]
    if as_json:
        print_json(found)
    else:
        rows = [(str(row["version"]), row["type"], shown_time(row["timestamp"]), f"{len(row['data'])}") for row in found]
        print_table(("version", "type", "added", "characters"), rows)


@app.command()
def upload(
    topic: Topic,
    definition: Definition = None,
    kind: Type = "AVRO",
    properties: Properties = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Add a version, if the topic's strategy allows it. A schema that it has already stays as it is."""
    admin, body = AdminClient(admin_url), _payload(definition, kind, properties)
    admin.post(f"{_path(topic)}/schema", body)
    version = admin.post(f"{_path(topic)}/version", body)["version"]
    done(f"topic {topic} has it as version {version}")


@app.command()
def check(
    topic: Topic,
    definition: Definition = None,
    kind: Type = "AVRO",
    properties: Properties = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Say whether a schema would be accepted, and if not (exit code 1) which field stands in the way."""
    answer = AdminClient(admin_url).post(f"{_path(topic)}/compatibility", _payload(definition, kind, properties))
    strategy = answer["schemaCompatibilityStrategy"]
    if not answer["compatibility"]:
        print(answer.get("reason", f"incompatible ({strategy})"))
        raise typer.Exit(1)
    print(f"compatible ({strategy})")


@app.command()
def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option(help="Also remove the versions: messages that carry them cannot be decoded any more.")
    ] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Put all versions out of force. They stay readable by number, unless --force."""
    AdminClient(admin_url).delete(f"{_path(topic)}/schema", force=force)
    done(f"topic {topic} has no schema any more")


def _path(topic: str) -> str:
    name = TopicName.parse(topic)
    namespace = name.namespace
    local_name = quoted(quoted(name.local_name))  # decoded twice (docs/admin.md, rule 2)
    return f"/admin/v2/schemas/{quoted(namespace.tenant)}/{quoted(namespace.local_name)}/{local_name}"


def _payload(definition: typer.FileText | None, kind: str, properties: list[str] | None) -> dict[str, Any]:
    text = "" if definition is None else definition.read()
    return {"type": kind.upper(), "schema": text, "properties": pairs(properties or [])}
