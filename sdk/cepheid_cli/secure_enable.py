"""`cepheid secure enable`: secure a running open cluster in stages, each with a rolling restart.

    0 open      nothing written
    1 beside    ports with TLS beside the open ones; the ZooKeeper user is there; clients with credentials are known, the others
                are `anonymous`; what permissions would deny is logged and done
    2 private   what the cluster creates in ZooKeeper is for its user alone
    3 enforced  clients have to authenticate, permissions are enforced; what was in ZooKeeper before is for the user alone
    4 closed    the ports without TLS are closed: bookies ask for roles and tickets

Rules
1. A stage is written when the one before is in force on each running broker and bookie, by their own reports. Later stages
   include earlier ones, so several machines with a copy of the directory can move to a stage one after the other.
2. Only the settings in `_STAGES` are changed, in the files of `cepheid secure init`. A smaller stage puts them back.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cepheid_cli.admin.common import connect_admin, print_lines, print_table
from cepheid_cli.toml_edit import Value, with_changes
from cepheid_ports import CepheidError

STAGE_FILE = "enable.stage"
LAST_STAGE = 4
ANONYMOUS_ROLE = "anonymous"
_PATH = "/cepheid/v1/security"

Report = Mapping[str, Any]
"""The security of a process, as the admin API reports it."""

_PRIVATE: dict[str, tuple[Value | None, ...]] = {"metadata_private": (False, None, None, None)}
_STAGES: dict[str, dict[str, tuple[Value | None, ...]]] = {
    "broker.toml": {
        **_PRIVATE,
        "tls.plain_ports": (True, True, True, None),
        "authentication.anonymous_role": (ANONYMOUS_ROLE, ANONYMOUS_ROLE, None, None),
        "authorization.enforced": (False, False, None, None),
    },
    "bookie.toml": {**_PRIVATE, "tls.port": (0, 0, 0, None)},
    "autorecovery.toml": _PRIVATE,
}
"""Value of each setting in each stage, by file and setting; None: it is not in the file."""

_CHECKS: dict[int, tuple[tuple[str, str, Callable[[Report], bool]], ...]] = {
    1: (
        ("*", "it has no user in ZooKeeper (metadata_auth_file)", lambda said: said["zookeeper_user"]),
        ("*", "it has no port with TLS", lambda said: said["tls"]),
        ("brokers", "it does not authenticate clients", lambda said: said["authentication"]),
    ),
    2: (("*", "what it creates in ZooKeeper is for everybody (metadata_private)", lambda said: said["zookeeper_private"]),),
    3: (
        ("brokers", "it serves clients without credentials (anonymous_role)", lambda said: not said["anonymous"]),
        ("brokers", "it does not enforce permissions", lambda said: said["enforced"]),
    ),
    4: (("*", "it has a port without TLS", lambda said: not said["plain"]),),
}
_NOTES = {
    1: (
        "restart: all bookies, brokers and autorecovery processes, one after the other, with --secure {directory}",
        "then:    move clients to pulsar+ssl:// and https://, with credentials; Spark and `cepheid read` need a certificate too",
        "         grant roles what they need: brokers log what would be denied as authorization.would_deny",
        "         give programs that read ZooKeeper themselves the user in {directory}/metadata.auth",
    ),
    2: ("restart: all bookies, brokers and autorecovery processes, one after the other",),
    3: (
        "restart: all brokers, one after the other: clients without credentials or without a grant are refused from then on",
        "then:    move the rest of the clients to TLS; what still uses the open ports loses them in stage 4",
    ),
    4: ("restart: all bookies and brokers, one after the other: their open ports are closed",),
}


class StageNotPossibleError(CepheidError):
    """The previous stage is not in force everywhere, or a requirement of the stage is missing."""


def stage_of(directory: Path) -> int:
    """Return the stage that the files of a directory are in; 0: `cepheid secure enable` has not been used, or has ended."""
    try:
        return int((directory / STAGE_FILE).read_text().strip())
    except FileNotFoundError:
        return 0
    except ValueError:
        raise StageNotPossibleError(f"{directory / STAGE_FILE} has no number: write the stage into it, or remove it") from None


def not_in_force(stage: int, found: Mapping[str, Mapping[str, Report | None]]) -> list[str]:
    """Return why a stage is not in force, a sentence for each process; `found` has the reports of brokers and bookies."""
    reasons: list[str] = []
    for kind, processes in found.items():
        for name, said in processes.items():
            if said is None:
                reasons.append(f"{name} has not said how it is secured: it runs an older release, or has just started")
                continue
            checks = [check for each in range(1, stage + 1) for check in _CHECKS[each] if check[0] in ("*", kind)]
            problem = next((text for _, text, holds in checks if not holds(said)), None)
            if problem is not None:
                reasons.append(f"{name}: {problem}")
    return reasons


def write_stage(directory: Path, stage: int) -> None:
    """Write the settings of a stage; 0: those of `cepheid secure init`. Raises UneditableFileError, StageNotPossibleError."""
    from cepheid_security.authority import replace_private

    changed: dict[Path, str] = {}
    for name, settings in _STAGES.items():
        path = directory / name
        if not path.is_file():
            raise StageNotPossibleError(
                f"{directory} has no {name}: make it with `cepheid secure init {directory}`", path=str(path)
            )
        changes = {setting: values[stage - 1] if stage else None for setting, values in settings.items()}
        changed[path] = with_changes(path.read_text(encoding="utf-8"), changes, str(path))
    for path, text in changed.items():  # all of them can be changed
        replace_private(path, text.encode())
    if stage:
        replace_private(directory / STAGE_FILE, f"{stage}\n".encode())
    else:
        (directory / STAGE_FILE).unlink(missing_ok=True)


def run_enable(directory: Path, stage: int | None, metadata_url: str | None, admin_url: str) -> None:
    """Write the next stage, or `stage`, if that is possible. Raises StageNotPossibleError, cepheid.Error."""
    present = stage_of(directory)
    wanted = present + 1 if stage is None else stage
    if not 0 <= wanted <= LAST_STAGE:
        done = f"stage {LAST_STAGE} is the last one" if stage is None else f"stages are 0 to {LAST_STAGE}, got {stage}"
        raise StageNotPossibleError(f"{done}; `cepheid secure status` shows what is in force")
    if wanted > present + 1:
        raise StageNotPossibleError(f"{directory} is in stage {present}: stage {present + 1} comes first")
    if wanted > present:
        _check(directory, present, admin_url)
        if wanted == 3:
            _close_metadata(directory, metadata_url)
    write_stage(directory, wanted)
    print(f"{directory} is in stage {wanted} of {LAST_STAGE}")
    if wanted < present:
        print("restart: all brokers, bookies and autorecovery processes, one after the other")
        return
    shown = shlex.quote(str(directory))
    print_lines(line.format(directory=shown) for line in _NOTES[wanted])
    if wanted < LAST_STAGE:
        print(f"next:    cepheid secure enable {shown}")
    else:
        print("check:   cepheid secure status")


def run_status(admin_url: str) -> None:
    """Print how each process is secured."""
    found = connect_admin(admin_url).call("GET", _PATH)
    words = (
        *("tls", "plain", "authentication", "anonymous", "enforced"),
        *("zookeeper_user", "zookeeper_private", "zookeeper_tls", "revocation_lists"),
    )
    rows = [
        [name, kind.removesuffix("s"), *(_shown(said, word) for word in words)]
        for kind in ("brokers", "bookies")
        for name, said in found[kind].items()
    ]
    heads = ("TLS", "PLAIN PORTS", "CREDENTIALS", "ANONYMOUS", "PERMISSIONS", "ZK USER", "ZK PRIVATE", "ZK TLS", "CRL")
    print_table(("NAME", "KIND", *heads), rows)
    print_lines(f"problem: {problem}" for problem in found["problems"])


def _shown(said: Report | None, word: str) -> str:
    """Return one fact for display, or "?" if the process or the queried broker is of a release that does not report it."""
    if said is None or word not in said:
        return "?"
    return "yes" if said[word] else "no"


def _check(directory: Path, present: int, admin_url: str) -> None:
    """Raise StageNotPossibleError if the present stage is not in force everywhere, or files lack settings for a later one."""
    from cepheid_cli.secured_cluster import cluster_settings, old_files

    optional = {"tls.crl"}  # no stage depends on it, and the files of a stage under way are not updated
    lacking = [each.path.name for each in old_files(directory, cluster_settings(directory)) if each.missing.keys() - optional]
    if lacking:
        raise StageNotPossibleError(
            f"{', '.join(lacking)} in {directory} lack settings of this release: "
            f"run `cepheid secure init {directory} --update` first"
        )
    found = connect_admin(admin_url).call("GET", _PATH)
    reasons = not_in_force(present, {kind: found[kind] for kind in ("brokers", "bookies")})
    if reasons:
        raise StageNotPossibleError(f"stage {present} is not in force everywhere:\n  " + "\n  ".join(reasons))


def _close_metadata(directory: Path, metadata_url: str | None) -> None:
    """Restrict earlier nodes to the cluster's user. From stage 2 on all processes have it, and create only such nodes."""
    from cepheid_cli.secured_cluster import metadata_auth
    from cepheid_metadata.zookeeper_acls import set_cluster_acls

    if metadata_url is None:
        raise StageNotPossibleError("stage 3 closes ZooKeeper: name it as --metadata zk://host:port/root")
    report = set_cluster_acls(metadata_url, auth=metadata_auth(directory))
    print(f"ZooKeeper: {report.nodes} nodes are readable by the user of the cluster alone")
