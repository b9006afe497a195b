"""Regular expressions from clients and operators, matched so that they cannot stall the broker.

Python's `re` backtracks: one hostile pattern, `(a+)+$`, would hold the loop for minutes, even from a thread, as it keeps the
interpreter's lock and cannot be stopped. RE2 matches in time linear in the name and in bounded memory; newer Pulsar brokers use it
for the same reason (RE2/J). It has no lookaround and no back-references; these are refused with an error that names them.
"""

from __future__ import annotations

from typing import Any

from cepheid_broker.errors import NotAllowedError

MAX_PATTERN_CHARS = 2000
MAX_COMPILED_BYTES = 1 << 20


def compile_pattern(pattern: str, what: str) -> Any:
    """Return an object with `fullmatch`. Raises NotAllowedError; its text says by `what` what the pattern is for."""
    import re2  # not needed by most brokers

    if len(pattern) > MAX_PATTERN_CHARS:
        raise NotAllowedError(f"a pattern of {what} has {len(pattern)} characters; {MAX_PATTERN_CHARS} are possible")
    options = re2.Options()
    options.max_mem = MAX_COMPILED_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        why = error.args[0].decode(errors="replace") if error.args and isinstance(error.args[0], bytes) else str(error)
        raise NotAllowedError(f"{pattern[:200]!a} is not a valid pattern of {what}: {why} (RE2 syntax)") from None
