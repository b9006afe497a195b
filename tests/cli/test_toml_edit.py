"""Changes of single settings in TOML files that people wrote."""

from __future__ import annotations

import pytest

from cepheid_cli.toml_edit import UneditableFileError, Value, with_changes

FILE = """# ours
metadata = "zk://a"

[tls]
# the pair
certificate_file = "a = [b].pem"
names = [
  "one",  # first
  "two",
]

[authentication]
methods = ["token"]
"""


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ({"metadata_private": False}, 'metadata = "zk://a"\n', 'metadata = "zk://a"\nmetadata_private = false\n'),
        ({"tls.plain_ports": True}, '  "two",\n]\n', '  "two",\n]\nplain_ports = true\n'),
        ({"tls.names": ["x"]}, 'names = [\n  "one",  # first\n  "two",\n]\n', 'names = ["x"]\n'),
        ({"tls.names": None}, 'names = [\n  "one",  # first\n  "two",\n]\n', ""),
        ({"tls.missing": None}, "", ""),
        ({"metadata": None}, 'metadata = "zk://a"\n', ""),
        (
            {"authentication.anonymous_role": 'a "b"'},
            'methods = ["token"]\n',
            'methods = ["token"]\nanonymous_role = "a \\"b\\""\n',
        ),
        (
            {"authorization.enabled": True, "authorization.roles": []},
            'methods = ["token"]\n',
            'methods = ["token"]\n\n[authorization]\nenabled = true\nroles = []\n',
        ),
    ],
)
def test_a_change_leaves_the_rest_of_the_file_alone(change: dict[str, Value | None], before: str, after: str) -> None:
    changed = with_changes(FILE, change, "broker.toml")
    assert changed == (FILE.replace(before, after) if before else FILE)
    assert with_changes(changed, change, "broker.toml") == changed


@pytest.mark.parametrize("text", ["tls.port = 1\n", "tls = {port = 1}\n", "[tls\n"])
def test_a_file_that_is_written_otherwise_is_refused(text: str) -> None:
    with pytest.raises(UneditableFileError, match=r"edit it by hand, so that it has tls.port = 0|is not TOML"):
        with_changes(text, {"tls.port": 0}, "bookie.toml")
