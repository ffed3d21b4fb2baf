"""The one place that knows which optional packages are there: torch, numba, triton.

- `torch` is a stand-in that imports the real module at first use, so that codecs can be listed and pages checked without it.
- `inlined` marks a helper that compiled code may call; without numba it is the plain function.
- `compile_reader` and `compile_kernel` compile for the CPU. The results are cached on disk under a name that hashes our sources, because
  numba's own cache only notices changes of the file that a function stands in, not of the helpers it calls.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvarto.errors import BackendUnavailable
from kvarto.home import home

if TYPE_CHECKING:
    import torch as torch

    from kvarto.layout import SlabLayout

F = TypeVar("F", bound=Callable[..., Any])


@cache
def why_unavailable(package: str) -> str:
    """Why `package` cannot be imported here, or "" if it can. It is imported to find out: that one is installed says little."""
    try:
        importlib.import_module(package)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return "it is not installed"
        return "it does not import here (" + " ".join(f"{type(error).__name__}: {error}".split()) + ")"
    return ""


def available(package: str) -> bool:
    """True if `package` imports here."""
    return not why_unavailable(package)


def require(package: str, *, extra: str = "engine") -> Any:
    """Import a package of an extra, or raise BackendUnavailable with the reason and the command that installs it."""
    if reason := why_unavailable(package):
        raise BackendUnavailable(package, reason, f"run: pip install 'kvarto[{extra}]'")
    return importlib.import_module(package)


class _Lazy:
    """A module that is imported when its first attribute is read. An attribute is looked up once: a decode step reads dozens."""

    def __init__(self, package: str) -> None:
        self._package = package

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(require(self._package), attribute)
        setattr(self, attribute, value)
        return value


if not TYPE_CHECKING:
    torch = _Lazy("torch")


def inlined(function: F) -> F:
    """Let compiled CPU code call `function`; in plain Python it stays what it is."""
    if not available("numba"):
        return function
    return require("numba").extending.register_jitable(forceinline=True)(function)  # type: ignore[no-any-return]


if available("numba"):
    from kvarto.unpack import load_fp8s, load_low, load_numbers, scale_numbers


@inlined
def load_floats(slab, start, dtype, out):  # type: ignore[no-untyped-def]
    """For compiled readers: `out.size` numbers of `dtype` (those of `kvarto.tile.Term` but "low") at byte `start` of slab, into float32 out [n]."""
    load_numbers(slab, start, dtype, out)


@inlined
def load_low_zeros(slab, start, highest, scales, out):  # type: ignore[no-untyped-def]
    """For compiled readers: zeros ("low") of float16 `scales` at byte `start`, codes being 0 .. `highest`, into float32 out [n]."""
    load_low(slab, start, -0.5 * highest - 2.0, scales, out)


@inlined
def load_fp8(slab, start, e5m2, tile):  # type: ignore[no-untyped-def]
    """For compiled readers: float8 numbers at byte `start` of slab, into float32 tile [rows, columns]. Exact, subnormals included."""
    load_fp8s(slab, start, e5m2, tile.reshape(tile.size))


@inlined
def scale_floats(slab, scale_at, zero_at, out):  # type: ignore[no-untyped-def]
    """For compiled readers: out[i] = out[i] * scale[i] + zero[i], with float16 scales and zeros at those bytes of slab; out float32 [n]."""
    scale_numbers(slab, scale_at, zero_at, out)


class CompiledReader:
    """A tile reader as a C function that takes a pointer for each array. Kernels use its address; calling it is for tests."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.address: int = compiled.address

    def __call__(self, *arrays: Any) -> None:
        """The arrays of `compile_reader`, as numpy arrays."""
        function = self._compiled.ctypes
        function(*[ctypes.cast(array.ctypes.data, kind) for array, kind in zip(arrays, function.argtypes, strict=True)])


def compile_reader(function: Callable[..., None], layout: SlabLayout, constants: int = 0) -> CompiledReader:
    """Compile a tile reader: `read(slab, constants, tile, row_scale, row_zero, channel_scale, channel_zero) -> None`.

    slab uint8 [slab_nbytes]; constants float32 [constants], the head's row of `Codec.constants`; tile float32 [S, D] for K or [D, S] for V; the row
    terms float32 [S], the channel terms float32 [D]. The kernel fills scales with 1 and zeros with 0 once; a reader writes the terms that its codec
    has, always the same ones. Shapes are constants to the compiler, so loops are compiled for them; one kernel calls the readers of all codecs by
    address.
    """
    numba = require("numba")
    read, carray, types = inlined(function), numba.carray, numba.types
    nbytes, tile_shape, S, D = (layout.nbytes,), layout.tile_shape, (layout.page_tokens,), (layout.dim,)

    def read_at(slab, told, tile, row_scale, row_zero, channel_scale, channel_zero):  # type: ignore[no-untyped-def]
        read(
            carray(slab, nbytes),
            carray(told, (constants,)),
            carray(tile, tile_shape),
            carray(row_scale, S),
            carray(row_zero, S),
            carray(channel_scale, D),
            carray(channel_zero, D),
        )

    floats = types.CPointer(types.float32)
    # What a codec outside this package calls is not in the cache's name, so it is compiled anew in every process.
    ours = Path(function.__code__.co_filename).is_relative_to(Path(__file__).parent)
    return CompiledReader(_compile(read_at, types.void(types.CPointer(types.uint8), *[floats] * 6), cache=ours))


def compile_kernel(function: Callable[[Any], None], record: Any, *, exact: bool = False) -> Any:
    """Compile `function(pointer to a record of this numpy dtype) -> None` to a C function, with reassociation allowed unless it is to be `exact`.

    NaN and infinity keep their meaning. The result's `address` is what a team of threads is started with (kernels/team.py).
    """
    numba = require("numba")
    pointer = numba.types.CPointer(numba.from_dtype(record))
    return _compile(
        function, numba.types.void(pointer), fastmath=False if exact else {"reassoc", "contract", "arcp", "nsz"}
    )


def _compile(function: Callable[..., None], signature: Any, *, cache: bool = True, **options: Any) -> Any:
    numba = require("numba")
    previous, folder = numba.config.CACHE_DIR, _cache_folder() if cache else None
    numba.config.CACHE_DIR = folder or ""
    try:
        # The cache folder is chosen here, at decoration, so the setting need not outlive this call.
        return numba.cfunc(signature, cache=folder is not None, error_model="numpy", **options)(function)
    finally:
        numba.config.CACHE_DIR = previous


@cache
def _cache_folder() -> str | None:
    """Where compiled code is kept, or None, with a warning, if nothing can be written there.

    numba itself would then fall back to the folder of the source, under a name that does not change when what is called changes.
    """
    folder = home() / "compiled" / _sources_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        warnings.warn(
            f"kernels are compiled anew in every process: {folder} cannot be written ({error.strerror}); set KVARTO_HOME",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@cache
def _sources_digest() -> str:
    """Of the files that compiled code is made of: other edits need not compile it again."""
    digest = hashlib.sha256(require("numba").__version__.encode())
    root = Path(__file__).parent
    for path in sorted(
        [root / "jit.py", root / "simd.py", root / "unpack.py", *root.glob("codecs/*.py"), *root.glob("kernels/*.py")]
    ):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
