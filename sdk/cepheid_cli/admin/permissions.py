"""`cepheid permissions`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminClient, AdminUrl, Json, done, print_json, print_table, sub_app
from cepheid_cli.admin_client import namespace_path, quoted, topic_path
from cepheid_wire import TopicName

app = sub_app("permissions", "Permissions: which roles may use a namespace, a topic or a subscription.")


class Action(StrEnum):
    PRODUCE = "produce"
    CONSUME = "consume"
    FUNCTIONS = "functions"
    SOURCES = "sources"
    SINKS = "sinks"
    PACKAGES = "packages"


class Asked(StrEnum):
    PRODUCE = "produce"
    CONSUME = "consume"
    LOOKUP = "lookup"
    ADMIN = "admin"


Role = Annotated[str, typer.Argument(help="Role: the name of a client, as its token or certificate has it.")]
Target = Annotated[str, typer.Argument(help="Namespace, as public/default, or topic, short (orders) or full.")]
OfSubscription = Annotated[
    str, typer.Option("--subscription", help="Reserve this subscription of the namespace for roles. They need consume as well.")
]


@app.command()
def grant(
    role: Role,
    target: Target,
    actions: Annotated[list[Action] | None, typer.Argument(help="What the role may do there.")] = None,
    subscription: OfSubscription = "",
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Grant a role actions on a namespace or a topic, in place of what it had there."""
    admin = AdminClient(admin_url)
    if subscription:
        if actions or not _is_namespace(target):
            raise typer.BadParameter("--subscription takes a namespace, and no actions")
        path = f"{namespace_path(target)}/permissions/subscription"
        roles = admin.get(path).get(subscription, [])
        admin.post(f"{path}/{quoted(subscription)}", [*roles, *([] if role in roles else [role])])
        done(f"subscription {subscription} of {target} is open to {role}")
        return
    if not actions:
        raise typer.BadParameter(f"name one or more of: {', '.join(action.value for action in Action)}")
    names = list(dict.fromkeys(action.value for action in actions))
    admin.post(f"{_path(target)}/permissions/{quoted(role)}", names)
    done(f"{role} may {', '.join(names)} on {target}")


@app.command()
def revoke(role: Role, target: Target, subscription: OfSubscription = "", admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Revoke all actions of a role on a namespace or a topic. Grants on single topics of a namespace stay."""
    admin = AdminClient(admin_url)
    if subscription and not _is_namespace(target):
        raise typer.BadParameter("--subscription takes a namespace")
    names = [subscription, role] if subscription else [role]
    admin.delete("/".join((f"{_path(target)}/permissions", *map(quoted, names))))
    done(f"{role} has no grants on {f'subscription {subscription} of {target}' if subscription else target} any more")


@app.command("list")
def list_permissions(target: Target, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Roles and what they may do: on a namespace with its subscriptions, or on a topic (grants on its namespace included)."""
    admin, path = AdminClient(admin_url), f"{_path(target)}/permissions"
    granted = admin.get(path)
    if not _is_namespace(target):
        if as_json:
            print_json(granted)
        else:
            print_table(("ROLE", "ACTIONS"), sorted((role, " ".join(actions)) for role, actions in granted.items()))
        return
    reserved, mode = admin.get(f"{path}/subscription"), admin.get(f"{namespace_path(target)}/subscriptionAuthMode")
    if as_json:
        print_json({"roles": granted, "subscriptions": reserved, "subscription_auth_mode": mode})
        return
    print_table(("ROLE", "ACTIONS"), sorted((role, " ".join(actions)) for role, actions in granted.items()))
    if reserved:
        print()
        print_table(("SUBSCRIPTION", "ROLES"), sorted((name, " ".join(roles)) for name, roles in reserved.items()))
    if mode != "None":
        print(f"\nsubscriptions must begin with the role ({mode})")


@app.command()
def why(
    role: Role,
    topic: Annotated[str, typer.Argument(help="Topic, short (orders) or full (persistent://public/default/orders).")],
    action: Annotated[Asked, typer.Argument(help="What the role wants to do.")],
    subscription: Annotated[str, typer.Option("--subscription", help="Subscription it would consume with.")] = "",
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Show whether a role may do something on a topic, and which rule says so. The exit code is 1 when it may not."""
    query = {"role": role, "topic": str(TopicName.parse(topic)), "action": action.value, "subscription": subscription or None}
    found = AdminClient(admin_url).get("/cepheid/v1/permissions/why", **query)
    print(f"{'allowed' if found['allowed'] else 'denied'}: {found['rule']}")
    if not found["allowed"]:
        raise typer.Exit(1)


def _is_namespace(target: str) -> bool:
    """Whether it looks like `tenant/namespace`. A topic has no slash, or a full name."""
    return target.count("/") == 1


def _path(target: str) -> str:
    return namespace_path(target) if _is_namespace(target) else topic_path(target)
