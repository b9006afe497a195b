"""Read what the last stage of the Containerfile says about the image, so that both ways of building it agree."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_VARIABLE = re.compile(r"\$\{(\w+)\}")
CONFIG_OF = {"USER": "User", "WORKDIR": "WorkingDir"}


@dataclass(slots=True)
class LastStage:
    """`config` has the keys of an OCI image config; `arguments` are those of the stage, with their defaults replaced."""

    config: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)


def read_last_stage(text: str, given: Mapping[str, str]) -> LastStage:
    """Return the last stage of a Containerfile. `given` are build arguments.

    RUN and COPY are skipped. Raises ValueError for an instruction that this reader does not know: an image without it would differ.
    """
    stage = LastStage()
    for line in _instructions(text):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = LastStage()
            continue
        if word in ("ENTRYPOINT", "CMD"):
            stage.config["Entrypoint" if word == "ENTRYPOINT" else "Cmd"] = json.loads(rest)
            continue
        value = _replace_variables(rest, stage.arguments)
        if word == "ARG":
            name, _, default = _assignment(value)
            stage.arguments[name] = given.get(name, default)
        elif word == "ENV":
            name, _, content = _assignment(value)
            stage.config.setdefault("Env", []).append(f"{name}={content}")
        elif word == "LABEL":
            name, _, content = _assignment(value)
            stage.config.setdefault("Labels", {})[name] = content
        elif word == "EXPOSE":
            stage.config["ExposedPorts"] = {f"{port}/tcp": {} for port in value.split()}
        elif word in CONFIG_OF:
            stage.config[CONFIG_OF[word]] = value
        elif word not in ("RUN", "COPY"):
            raise ValueError(
                f"the Containerfile has {word!r}, which container/containerfile.py cannot read: teach it, or do without"
            )
    return stage


def debian_packages(stage: LastStage) -> list[str]:
    """Return the Debian packages of the stage: with the extra `spark`, a Java that runs Spark is among them."""
    return [*stage.arguments["PACKAGES"].split(), *(stage.arguments["SPARK_PACKAGES"].split() if _has_spark(stage) else ())]


def user_line(stage: LastStage) -> str:
    """Return the line of /etc/passwd that Spark needs, because Hadoop refuses a user without a name; empty without Spark."""
    return stage.arguments["SPARK_USER"] if _has_spark(stage) else ""


def _has_spark(stage: LastStage) -> bool:
    return "spark" in stage.arguments["EXTRAS"].split(",")


def _instructions(text: str) -> list[str]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return [line.strip() for line in "\n".join(lines).replace("\\\n", " ").splitlines()]


def _replace_variables(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1], ""), text)


def _assignment(value: str) -> tuple[str, str, str]:
    """Split NAME=VALUE, where the value may be quoted."""
    (word,) = shlex.split(value)
    return word.partition("=")
