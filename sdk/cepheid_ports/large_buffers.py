"""Buffers of about a megabyte come and go with every block and message; the C library should keep their memory for the next one.

By default glibc gives freed memory back to the kernel and gets it again, page by page: two thirds of what a bookie spends on a
megabyte that is scanned (2.2 ms instead of 1.3). The price: up to 64 MiB that nobody uses stay with the process; what is free
beyond that, at the end of the heap, goes back as ever.
"""

from __future__ import annotations

import sys
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_MMAP_THRESHOLD_BYTES = 32 << 20  # the most that glibc takes
_TRIM_THRESHOLD_BYTES = 64 << 20


@cache
def keep_large_buffers() -> bool:
    """Of the whole process, once. False where the C library has nothing to tell: then nothing changes."""
    if sys.platform != "linux":
        return False
    try:
        import ctypes
    except ImportError:  # a Python that was built without it
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES))
