"""`cepheid config`: a role's settings, checked without starting it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cepheid_cli.admin.common import done, sub_app
from cepheid_cli.settings_loader import load_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import BaseModel

app = sub_app("config", "Settings of the server processes (docs/settings.md).")


class RoleName(StrEnum):
    STANDALONE = "standalone"
    BROKER = "broker"
    BOOKIE = "bookie"
    AUTORECOVERY = "autorecovery"


@app.callback()
def _config() -> None:
    """Settings of the server processes."""


@app.command()
def check(
    role: Annotated[RoleName, typer.Argument(help="The process whose file it is.")],
    file: Annotated[Path, typer.Argument(help="TOML file of settings, as for --config.")],
) -> None:
    """Check a settings file and the environment like the process at its start. Nothing is started or connected."""
    model, renamed, refused = _reading_of(role)
    load_settings(model, flags={}, environment_prefix=f"CEPHEID_{role.upper()}_", file=file, renamed=renamed, refused=refused)
    done(f"{file} has valid settings for cepheid {role}")


def _reading_of(role: RoleName) -> tuple[type[BaseModel], Mapping[str, str], Mapping[str, str]]:
    """Return the model of a role, its renamed settings, and names that are not settings, with the reason."""
    if role in (RoleName.STANDALONE, RoleName.BROKER):
        from cepheid_broker.settings import RENAMED, BrokerRoleSettings
        from cepheid_broker.standalone import StandaloneSettings

        return (StandaloneSettings if role == RoleName.STANDALONE else BrokerRoleSettings), RENAMED, {}
    from cepheid_cli.bookie import NOT_KEPT
    from cepheid_recovery.roles import AutoRecoverySettings, BookieNodeSettings

    return (BookieNodeSettings, {}, NOT_KEPT) if role == RoleName.BOOKIE else (AutoRecoverySettings, {}, {})
