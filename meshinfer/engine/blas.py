"""A fast BLAS under MLX on Linux CPUs, where the machine can build 20 lines of C; else MLX runs as it comes.

`openblas_shim.c` tells why and what it gains. It is compiled once into the user's cache and loaded from
there on. Nothing here is an error: `use_openblas` says in words what it did, and slow is still right.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import platformdirs

_SOURCE = Path(__file__).with_name("openblas_shim.c")
_PACKAGE = "scipy_openblas32"
_COMPILERS = ("cc", "gcc", "clang")
_COMPILE_SECONDS = 60.0
"""It takes 0.1 s; a compiler that hangs must not hold up a runner for longer than a minute."""


def cache_directory() -> Path:
    """Where built things lie: MESHINFER_CACHE, or the platform's cache directory."""
    named = os.environ.get("MESHINFER_CACHE")
    return Path(named) if named else platformdirs.user_cache_path("meshinfer", appauthor=False)


def use_openblas() -> str:
    """Put OpenBLAS before MLX's own BLAS; call it before the first import of `mlx.core`.

    Returns:
        What is used, or why nothing is: a sentence for the log.
    """
    if not sys.platform.startswith("linux"):
        return f"MLX's own BLAS: {sys.platform} has a fast one"
    if os.environ.get("MESHINFER_BLAS", "").lower() in ("off", "none", "0"):
        return "MLX's own BLAS: MESHINFER_BLAS says so"
    if "mlx.core" in sys.modules:
        return "MLX's own BLAS: MLX was loaded before OpenBLAS could be"
    library = _find_library()
    if library is None:
        return f"MLX's own BLAS, 20 times slower in prefill: the package {_PACKAGE.replace('_', '-')} is not installed"
    try:
        shim = _built_shim()
        # Global scope: libmlx looks there first for cblas_sgemm, and the shim for OpenBLAS's prefixed names.
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(shim), mode=ctypes.RTLD_GLOBAL)
    except _CannotBuild as error:
        return f"MLX's own BLAS, 20 times slower in prefill: {error}"
    except OSError as error:
        return f"MLX's own BLAS, 20 times slower in prefill: OpenBLAS cannot be loaded ({error})"
    return f"OpenBLAS {metadata.version(_PACKAGE)} with {os.environ.get('OPENBLAS_NUM_THREADS', 'all')} threads"


class _CannotBuild(Exception):
    pass


def _find_library() -> Path | None:
    """The shared library inside the package, without running the package."""
    spec = find_spec(_PACKAGE)
    roots = list(spec.submodule_search_locations or ()) if spec else []
    return next((path for root in roots for path in sorted(Path(root, "lib").glob("libscipy_openblas*.so*"))), None)


def _built_shim() -> Path:
    """The compiled shim, built now if it is not there: named by its content, written aside and renamed."""
    source = _SOURCE.read_bytes()
    key = hashlib.sha256(source + metadata.version(_PACKAGE).encode() + platform.machine().encode()).hexdigest()[:16]
    directory = cache_directory() / "blas"
    built = directory / f"openblas_shim-{key}.so"
    if built.exists():
        return built
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise _CannotBuild(f"no C compiler ({', '.join(_COMPILERS)}) to build the shim; install one, such as gcc")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            output = Path(scratch, built.name)
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(output), str(_SOURCE)]
            done = subprocess.run(command, capture_output=True, timeout=_COMPILE_SECONDS, check=False)
            if done.returncode != 0:
                raise _CannotBuild(f"{compiler} failed: {done.stderr.decode(errors='replace').strip()[:400]}")
            output.replace(built)
    except subprocess.TimeoutExpired as error:
        raise _CannotBuild(f"{compiler} did not end within {_COMPILE_SECONDS:.0f} s") from error
    except OSError as error:
        raise _CannotBuild(f"the shim cannot be built in {directory} ({error})") from error
    return built
