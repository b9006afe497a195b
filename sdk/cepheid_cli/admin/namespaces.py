"""`cepheid namespaces`."""

from __future__ import annotations

from typing import Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Namespace, connect_admin, done, print_json, print_lines, sub_app
from cepheid_cli.admin.policy_words import WORDS, namespace_base, set_policy, shown_policy, unset_policy
from cepheid_wire import check_tenant

app = sub_app("namespaces", "Namespaces: topics under one set of policies.")

_FORMS = "; ".join(f"{name} {word.form}" for name, word in WORDS.items())
Policy = Annotated[str, typer.Argument(help=f"One of: {', '.join(WORDS)}.")]


@app.command("list")
def list_namespaces(tenant: Annotated[str, typer.Argument(help="Tenant.")] = "public", admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List the namespaces of a tenant."""
    print_lines(connect_admin(admin_url).namespaces.list(check_tenant(tenant)))


@app.command()
def show(namespace: Namespace, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show all policies of a namespace in the API's form."""
    print_json(connect_admin(admin_url).namespaces.policies(namespace))


@app.command()
def create(namespace: Namespace, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Create a namespace."""
    connect_admin(admin_url).namespaces.create(namespace)
    done(f"namespace {namespace} created")


@app.command()
def delete(
    namespace: Namespace,
    force: Annotated[bool, typer.Option("--force", help="With everything in it.")] = False,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Delete a namespace."""
    connect_admin(admin_url).namespaces.delete(namespace, force=force)
    done(f"namespace {namespace} deleted")


@app.command()
def unload(
    namespace: Namespace,
    bundle: Annotated[str, typer.Option("--bundle", help="Only this bundle, such as 0x00000000_0x40000000.")] = "",
    to: Annotated[str, typer.Option("--to", help="The new broker of the bundle: its id, or host:port of its API.")] = "",
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Move a namespace to other brokers; clients follow. Without another broker its topics are closed and opened again."""
    if to and not bundle:
        raise typer.BadParameter("only a single bundle can be moved to a broker: name it with --bundle")
    admin = connect_admin(admin_url)
    if bundle:
        admin.namespaces.unload_bundle(namespace, bundle, destination_broker=to)
    else:
        admin.namespaces.unload(namespace)
    done(f"{f'bundle {bundle} of ' if bundle else ''}namespace {namespace} unloaded{f', to {to}' if to else ''}")


@app.command("set", help=f"Set a policy; it is in force within a second. Values: {_FORMS}.")
def set_(
    namespace: Namespace,
    policy: Policy,
    value: Annotated[str, typer.Argument(help="Its value.")],
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    set_policy(connect_admin(admin_url), namespace_base(namespace), policy, value, of_topic=False)
    done(f"{policy} of {namespace} is {value}")


@app.command("get")
def get(
    namespace: Namespace,
    policy: Policy,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Print a policy that is set here, in the form for `set` or as JSON."""
    found = shown_policy(connect_admin(admin_url), namespace_base(namespace), policy, of_topic=False)
    if found is None:
        done(f"{policy} of {namespace} is not set")
    else:
        print(found)


@app.command()
def unset(namespace: Namespace, policy: Policy, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Reset a policy to the broker's default."""
    unset_policy(connect_admin(admin_url), namespace_base(namespace), policy, of_topic=False)
    done(f"{policy} of {namespace} is not set")
