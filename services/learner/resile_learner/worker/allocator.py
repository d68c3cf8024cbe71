"""How a worker's memory is managed: what one iteration frees stays in the process, for the next one."""

import ctypes

_M_TRIM_THRESHOLD = -1  # numbers of malloc.h
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = (1 << 31) - 1  # the largest number that it takes


def keep_freed_memory() -> None:
    """Let glibc's malloc return freed memory to the system only beyond 2 GiB, and blocks of over 32 MiB at once.

    By default activations and gradients go back to the system in each iteration, and come again as thousands of page
    faults: a tenth to a quarter of an iteration. Another C library is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
