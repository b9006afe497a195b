"""Whether this installation can use object stores. Asked without importing any of the libraries: they are large."""

from __future__ import annotations

from importlib.util import find_spec

_LIBRARIES = ("obstore", "pyarrow")


def missing_requirements() -> str | None:
    """A sentence about what is not installed, and how to install it; None: everything is there."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} not installed; run pip install 'cepheid[tiered]' on every broker, and restart it"
