"""`cepheid schemas`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, Topic, connect_admin, done, print_json, print_table, sub_app
from cepheid_cli.admin.units import pairs, shown_time

if TYPE_CHECKING:
    from cepheid.admin.bodies import PostSchemaPayload

app = sub_app("schemas", "Schemas of topics: their versions and compatibility (docs/schemas.md).")

Definition = Annotated[
    typer.FileText | None, typer.Argument(help="File with the definition; - is standard input; omit it for STRING …")
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
    schemas = connect_admin(admin_url).schemas
    found = schemas.latest(topic) if version is None else schemas.of_version(topic, str(version))
    if as_json:
        print_json(found)
    else:
        print(found["data"])


@app.command()
def versions(topic: Topic, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List the active versions, oldest first."""
    found = connect_admin(admin_url).schemas.all_versions(topic)["getSchemaResponses"]
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
    """Add a version, if the topic's strategy allows it. A schema that the topic already has is not added again."""
    schemas, body = connect_admin(admin_url).schemas, _payload(definition, kind, properties)
    schemas.upload(topic, body)
    version = schemas.version_of(topic, body)["version"]
    done(f"topic {topic} has it as version {version}")


@app.command()
def check(
    topic: Topic,
    definition: Definition = None,
    kind: Type = "AVRO",
    properties: Properties = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Report whether a schema would be accepted, and if not (exit code 1), which field prevents it."""
    answer = connect_admin(admin_url).schemas.check_compatibility(topic, _payload(definition, kind, properties))
    strategy = answer["schemaCompatibilityStrategy"]
    if not answer["compatibility"]:
        print(answer.get("reason", f"incompatible ({strategy})"))
        raise typer.Exit(1)
    print(f"compatible ({strategy})")


@app.command()
def delete(
    topic: Topic,
    force: Annotated[
        bool, typer.Option(help="Also remove the versions: messages written with them can no longer be decoded.")
    ] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Deactivate all versions. They stay readable by number, unless --force."""
    connect_admin(admin_url).schemas.delete(topic, force=force)
    done(f"topic {topic} no longer has a schema")


def _payload(definition: typer.FileText | None, kind: str, properties: list[str] | None) -> PostSchemaPayload:
    text = "" if definition is None else definition.read()
    return {"type": kind.upper(), "schema": text, "properties": pairs(properties or [])}
