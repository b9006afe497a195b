"""Check whether this installation can use object stores, without importing the large libraries."""

from __future__ import annotations

from importlib.util import find_spec

_LIBRARIES = ("obstore", "pyarrow")


def missing_requirements() -> str | None:
    """Return a sentence about what is not installed and how to install it, or None."""
    missing = [name for name in _LIBRARIES if find_spec(name) is None]
    if not missing:
        return None
    are = "is" if len(missing) == 1 else "are"
    return f"{' and '.join(missing)} {are} not installed; run pip install 'cepheid[tiered]' on every broker, and restart it"
