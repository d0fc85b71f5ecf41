"""Freed memory given back to the system while much text passes.

Text is read, decoded and encoded in blocks of megabytes. glibc serves those from its heaps once one was freed, and
keeps the gaps that they leave between smaller blocks: without this, a process grows with all that it has read.
"""

import ctypes
import functools
import sys
from collections.abc import Callable

TRIM_CHARACTERS = 1 << 24


def trimmer() -> Callable[[int], None]:
    """Return a function to call with the characters that have passed; it gives memory back now and then.

    Now: what came before left gaps too. Where the C library is not glibc it does nothing.
    """
    trim()
    passed = 0

    def advance(characters: int) -> None:
        nonlocal passed
        passed += characters
        if passed >= TRIM_CHARACTERS:
            passed = 0
            trim()

    return advance


def trim() -> None:
    """Give the free pages of the C library's heaps back to the system (malloc_trim(3))."""
    function = _malloc_trim()
    if function is not None:
        function(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    function = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if function is not None:
        function.argtypes = [ctypes.c_size_t]
    return function
