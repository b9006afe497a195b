"""`cepheid brokers`: the brokers of a cluster."""

from __future__ import annotations

from cepheid_cli.admin.common import DEFAULT_URL, AdminUrl, Json, connect_admin, print_json, print_table, sub_app

app = sub_app("brokers", "Brokers of a cluster (docs/operations.md).")

BALANCE = "/cepheid/v1/balance"
_COLUMNS = ("broker", "address", "state", "load", "msg/s", "topics", "bundles")


@app.command("list")
def list_brokers(as_json: Json = False, admin_url: AdminUrl = DEFAULT_URL) -> None:
    """List running brokers with their load. A load of 1.00 is about what fills one core; * marks the leader."""
    found = connect_admin(admin_url).call("GET", BALANCE)
    if as_json:
        print_json(found["brokers"])
        return
    print_table(
        _COLUMNS,
        [
            (
                f"{broker['broker_id']}{'*' if broker['broker_id'] == found['leader'] else ''}",
                broker["address"],
                broker["state"],
                f"{broker['load']:.2f}",
                f"{broker['messages_per_s']:,.0f}",
                f"{broker['topics']:,}",
                f"{broker['bundles']:,}",
            )
            for broker in found["brokers"]
        ],
    )
