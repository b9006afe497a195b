"""`cepheid tenants`."""

from __future__ import annotations

from typing import Annotated

import typer

from cepheid_cli.admin.common import DEFAULT_URL, AdminClient, AdminUrl, done, print_json, print_lines, sub_app
from cepheid_cli.admin_client import tenant_path

app = sub_app("tenants", "Tenants: the first part of a topic's name.")

Tenant = Annotated[str, typer.Argument(help="Tenant.")]
Clusters = Annotated[list[str] | None, typer.Option("--cluster", help="Allowed cluster; repeat it. Default: all known ones")]


@app.command("list")
def list_tenants(admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Names of all tenants."""
    print_lines(AdminClient(admin_url).get("/admin/v2/tenants"))


@app.command()
def show(tenant: Tenant, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """What a tenant may do, and where."""
    print_json(AdminClient(admin_url).get(tenant_path(tenant)))


@app.command()
def create(
    tenant: Tenant,
    clusters: Clusters = None,
    admin_roles: Annotated[list[str] | None, typer.Option("--admin-role", help="Role that administers it; repeat it.")] = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Make a tenant."""
    admin, path = AdminClient(admin_url), tenant_path(tenant)
    allowed = clusters or admin.get("/admin/v2/clusters")
    admin.put(path, {"adminRoles": admin_roles or [], "allowedClusters": allowed})
    done(f"tenant {tenant} created")


@app.command()
def admins(
    tenant: Tenant,
    add: Annotated[list[str] | None, typer.Option("--add", help="Role that becomes an administrator; repeat it.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Role that ceases to be one; repeat it.")] = None,
    admin_url: AdminUrl = DEFAULT_URL,
) -> None:
    """Change the roles that administer a tenant, and print them."""
    admin, path = AdminClient(admin_url), tenant_path(tenant)
    info = admin.get(path)
    roles = [role for role in dict.fromkeys([*info["adminRoles"], *(add or ())]) if role not in (remove or ())]
    if roles != info["adminRoles"]:
        admin.post(path, {**info, "adminRoles": roles})
    print_lines(roles)


@app.command()
def delete(tenant: Tenant, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """Delete a tenant that has no namespaces."""
    AdminClient(admin_url).delete(tenant_path(tenant))
    done(f"tenant {tenant} deleted")
