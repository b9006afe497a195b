"""Finds the demos, which are programs in `examples/` of the repository. An installed package does not have them."""

from __future__ import annotations

import sys
from pathlib import Path

from cepheid_ports import CepheidError


class DemosNotFoundError(CepheidError):
    """The command runs from an installed package, without the repository."""

    hint = "clone the repository and run `make demo` or `make demo-spark` there"


def make_examples_importable() -> None:
    """Put the repository of this module on the import path. Raises DemosNotFoundError."""
    repository = Path(__file__).parents[2]
    if not (repository / "examples" / "flights" / "run.py").is_file():
        raise DemosNotFoundError("the installed package does not contain the demos")
    sys.path.insert(0, str(repository))  # first, as other packages also install `examples`
