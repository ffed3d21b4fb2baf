"""Run a compiled function on several threads at once: on torch's own OpenMP threads where there are any, else on Python's.

Two pools of OpenMP threads in one process take each other's cores: after a parallel region the threads of the one spin for milliseconds while
those of the other want to run. So we start our function in the OpenMP library that torch has loaded. It is entered from any number of
Python threads at once, as torch itself is.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_team(function: int, argument: int, threads: int) -> None:
    """Call the C function at address `function` with the pointer `argument` on up to `threads` threads, this one among them; wait for all.

    There may be fewer threads than asked for, so the function must take its share of the work from a counter. The GIL is released.
    """
    if threads == 1:
        _callable(function)(argument)
    elif (parallel := _openmp()) is not None:
        parallel(function, argument, threads, 0)
    else:
        _run_on_python_threads(function, argument, threads)


@cache
def _callable(function: int) -> Callable[[int], None]:
    return _FUNCTION(function)


@cache
def _openmp() -> Callable[[int, int, int, int], None] | None:
    """`GOMP_parallel` of the library that torch has loaded (GNU's, LLVM's and Intel's all have it), or None."""
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # No such symbol, or (Windows) no global namespace to look in.
        return None
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return parallel


def _run_on_python_threads(function: int, argument: int, threads: int) -> None:
    call = _callable(function)
    others = [_pool(threads).submit(call, argument) for _ in range(threads - 1)]
    call(argument)
    for other in others:
        other.result()


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="kvarto")
