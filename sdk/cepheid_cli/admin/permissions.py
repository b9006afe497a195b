"""`cepheid permissions`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, connect_admin, done, print_json, print_table, sub_app
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


class Prefix(StrEnum):
    ON = "on"
    OFF = "off"


Role = Annotated[str, typer.Argument(help="Role: the name of a client in its token or certificate.")]
Target = Annotated[str, typer.Argument(help="Namespace, such as public/default, or topic, short (orders) or full.")]
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
    """Grant a role actions on a namespace or a topic, replacing earlier ones there."""
    admin = connect_admin(admin_url)
    if subscription:
        if actions or not _is_namespace(target):
            raise typer.BadParameter("--subscription takes a namespace, and no actions")
        roles = admin.permissions.granted_on_subscriptions(target).get(subscription, [])
        admin.permissions.grant_on_subscription(target, subscription, [*roles, *([] if role in roles else [role])])
        done(f"subscription {subscription} of {target} is open to {role}")
        return
    if not actions:
        raise typer.BadParameter(f"name one or more of: {', '.join(action.value for action in Action)}")
    chosen = list(dict.fromkeys(actions))
    names = [action.value for action in chosen]
    if _is_namespace(target):
        admin.permissions.grant_in_namespace(target, role, chosen)  # type: ignore[arg-type]  # an Action is one of the words
    else:
        admin.permissions.grant_on_topic(target, role, chosen)  # type: ignore[arg-type]
    done(f"{role} may {', '.join(names)} on {target}")


@app.command()
def revoke(role: Role, target: Target, subscription: OfSubscription = "", admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Revoke all actions of a role on a namespace or a topic. Grants on single topics of a namespace stay."""
    admin = connect_admin(admin_url)
    if subscription and not _is_namespace(target):
        raise typer.BadParameter("--subscription takes a namespace")
    if subscription:
        admin.permissions.revoke_on_subscription(target, subscription, role)
    elif _is_namespace(target):
        admin.permissions.revoke_in_namespace(target, role)
    else:
        admin.permissions.revoke_on_topic(target, role)
    done(f"{role} no longer has grants on {f'subscription {subscription} of {target}' if subscription else target}")


@app.command("subscription-prefix")
def subscription_prefix(
    namespace: Annotated[str, typer.Argument(help="Namespace, such as public/default.")],
    mode: Annotated[Prefix, typer.Argument(help="on: names of subscriptions begin with the role; off: any name.")],
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Set whether roles may only use subscriptions whose names begin with the role, besides those granted to them."""
    if not _is_namespace(namespace):
        raise typer.BadParameter("name a namespace, such as public/default")
    connect_admin(admin_url).permissions.set_subscription_auth_mode(namespace, "Prefix" if mode is Prefix.ON else "None")
    done(f"subscriptions of {namespace} {'must begin with the role' if mode is Prefix.ON else 'may have any name'}")


@app.command("list")
def list_permissions(target: Target, as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List roles and their actions: on a namespace with its subscriptions, or on a topic (including grants on its namespace)."""
    permissions = connect_admin(admin_url).permissions
    if not _is_namespace(target):
        granted = permissions.granted_on_topic(target)
        if as_json:
            print_json(granted)
        else:
            print_table(("ROLE", "ACTIONS"), sorted((role, " ".join(actions)) for role, actions in granted.items()))
        return
    granted, reserved = permissions.granted_in_namespace(target), permissions.granted_on_subscriptions(target)
    mode = permissions.get_subscription_auth_mode(target)
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
    subscription: Annotated[str, typer.Option("--subscription", help="Subscription with which it would consume.")] = "",
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Show whether a role may do something on a topic, and which rule decides. The exit code is 1 if it may not."""
    found = connect_admin(admin_url).permissions.why(
        role=role, topic=str(TopicName.parse(topic)), action=action.value, subscription=subscription or None
    )
    print(f"{'allowed' if found['allowed'] else 'denied'}: {found['rule']}")
    if not found["allowed"]:
        raise typer.Exit(1)


def _is_namespace(target: str) -> bool:
    """Whether the text looks like `tenant/namespace`. A topic has no slash, or a full name."""
    return target.count("/") == 1
