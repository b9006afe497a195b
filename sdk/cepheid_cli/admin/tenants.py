"""`cepheid tenants`."""

from __future__ import annotations

from typing import Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, connect_admin, done, print_json, print_lines, sub_app
from cepheid_wire import check_tenant

app = sub_app("tenants", "Tenants: the first part of a topic's name.")

Tenant = Annotated[str, typer.Argument(help="Tenant.")]
Clusters = Annotated[list[str] | None, typer.Option("--cluster", help="Allowed cluster; repeat it. Default: all known ones")]


@app.command("list")
def list_tenants(admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List all tenants."""
    print_lines(connect_admin(admin_url).tenants.list())


@app.command()
def show(tenant: Tenant, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Show a tenant's administrators and clusters."""
    print_json(connect_admin(admin_url).tenants.get(check_tenant(tenant)))


@app.command()
def create(
    tenant: Tenant,
    clusters: Clusters = None,
    admin_roles: Annotated[list[str] | None, typer.Option("--admin-role", help="Role that administers it; repeat it.")] = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Create a tenant."""
    name, admin = check_tenant(tenant), connect_admin(admin_url)
    allowed = clusters or admin.clusters.list()
    admin.tenants.create(name, {"adminRoles": admin_roles or [], "allowedClusters": allowed})
    done(f"tenant {tenant} created")


@app.command()
def admins(
    tenant: Tenant,
    add: Annotated[list[str] | None, typer.Option("--add", help="Role that becomes an administrator; repeat it.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Role that is no longer one; repeat it.")] = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Change the roles that administer a tenant, and print them."""
    admin = connect_admin(admin_url)
    info = admin.tenants.get(check_tenant(tenant))
    roles = [role for role in dict.fromkeys([*info["adminRoles"], *(add or ())]) if role not in (remove or ())]
    if roles != info["adminRoles"]:
        admin.tenants.replace(tenant, {"adminRoles": roles, "allowedClusters": info["allowedClusters"]})
    print_lines(roles)


@app.command()
def delete(tenant: Tenant, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Delete a tenant that has no namespaces."""
    connect_admin(admin_url).tenants.delete(check_tenant(tenant))
    done(f"tenant {tenant} deleted")
