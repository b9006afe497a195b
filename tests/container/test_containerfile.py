"""The reader of the Containerfile sees the image that container engines would build."""

from __future__ import annotations

from pathlib import Path

import pytest

from container.containerfile import debian_packages, read_last_stage, user_line

CONTAINERFILE = Path(__file__).parents[2] / "Containerfile"


def test_our_containerfile_describes_an_image_that_restricted_pods_can_run() -> None:
    stage = read_last_stage(CONTAINERFILE.read_text(), {"VERSION": "1.2.3", "REVISION": "abc"})
    assert stage.config["User"] == "10001:10001"
    assert stage.config["Entrypoint"] == ["cepheid"]
    assert stage.config["WorkingDir"] == "/data"
    assert "JAVA_HOME=/opt/java" in stage.config["Env"]
    assert stage.config["Labels"]["org.opencontainers.image.version"] == "1.2.3"
    assert "python3" in stage.arguments["PACKAGES"].split()


@pytest.mark.parametrize(("extras", "has_spark"), [("server,tiered", False), ("server,tiered,spark", True)])
def test_the_extra_spark_brings_a_whole_java_and_a_name_for_its_user(extras: str, has_spark: bool) -> None:
    stage = read_last_stage(CONTAINERFILE.read_text(), {"EXTRAS": extras})
    assert ("openjdk-17-jre-headless" in debian_packages(stage)) == has_spark
    assert user_line(stage).startswith("cepheid:x:10001:10001:") == has_spark


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("FROM a AS b\nUSER 1\nFROM c\nWORKDIR /x", {"WorkingDir": "/x"}),  # earlier stages do not count
        ("FROM a\nRUN one \\\n    && two\n# comment\nUSER 5", {"User": "5"}),
        ('FROM a\nARG V=1\nENV NAME="two words ${V}"', {"Env": ["NAME=two words 1"]}),
        ("FROM a\nEXPOSE 1 2", {"ExposedPorts": {"1/tcp": {}, "2/tcp": {}}}),
    ],
)
def test_instructions_are_read(text: str, config: dict[str, object]) -> None:
    assert read_last_stage(text, {}).config == config


def test_an_unknown_instruction_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'HEALTHCHECK'"):
        read_last_stage("FROM a\nHEALTHCHECK NONE", {})
