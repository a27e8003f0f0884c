"""What a process does before MLX: each case in a process of its own, since MLX can be loaded once only."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="OpenBLAS is put under MLX on Linux only")

PREPARE = """
import json, resource, sys
from meshinfer.engine.platform import prepare_process
assert "mlx.core" not in sys.modules and "mlx_lm" not in sys.modules, "too late"
platform = prepare_process()
import mlx.core as mx
mx.random.seed(0)
report = {"float32": platform.computes_float32, "accelerator": platform.accelerator, "blas": platform.blas,
          "device": platform.device_memory_bytes, "files": resource.getrlimit(resource.RLIMIT_NOFILE)}
"""
PRODUCTS = """
# Against MLX's own element-wise arithmetic, for every way in which a product reaches BLAS.
worst = 0.0
for m in (1, 2, 7):
    for left in (False, True):
        for right in (False, True):
            a = mx.random.normal((33, m)).T if left else mx.random.normal((m, 33))
            b = mx.random.normal((21, 33)).T if right else mx.random.normal((33, 21))
            c = mx.random.normal((m, 21))
            exact = (a[:, :, None] * b[None]).sum(axis=1)
            worst = max(worst, mx.abs(a @ b - exact).max().item(), mx.abs(mx.addmm(c, a, b, 2.0, 0.5) - 2 * exact - c / 2).max().item())
report["worst"] = worst
"""


def in_process(code: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-c", f"{PREPARE}{code}\nprint(json.dumps(report), flush=True)\nimport os; os._exit(0)"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@linux
def test_openblas_multiplies_and_multiplies_rightly(tmp_path: Path) -> None:
    report = in_process(PRODUCTS, MESHINFER_CACHE=str(tmp_path))
    if "OpenBLAS" not in report["blas"]:
        pytest.skip(report["blas"])
    assert report["worst"] < 1e-4
    (shim,) = (tmp_path / "blas").iterdir()
    built = shim.stat().st_mtime_ns
    assert in_process("", MESHINFER_CACHE=str(tmp_path))["blas"] == report["blas"]
    assert shim.stat().st_mtime_ns == built, "built once"


@linux
def test_without_a_compiler_mlx_runs_as_it_comes(tmp_path: Path) -> None:
    report = in_process(PRODUCTS, MESHINFER_CACHE=str(tmp_path), PATH=str(tmp_path / "empty"))
    assert "no C compiler" in report["blas"]
    assert report["worst"] < 1e-4


@linux
def test_a_compiler_that_fails_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "cc").write_text("#!/bin/sh\necho 'cannot find anything' >&2\nexit 1\n")
    (fake / "cc").chmod(0o755)
    report = in_process("", MESHINFER_CACHE=str(tmp_path / "cache"), PATH=str(fake))
    assert "cannot find anything" in report["blas"]
    assert list((tmp_path / "cache" / "blas").iterdir()) == []


@linux
def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be built" in in_process("", MESHINFER_CACHE=str(tmp_path / "file"))["blas"]


def test_openblas_can_be_left_out() -> None:
    assert "MESHINFER_BLAS says so" in in_process("", MESHINFER_BLAS="off")["blas"] or not sys.platform.startswith(
        "linux"
    )


def test_the_limit_of_open_files_stays() -> None:
    """mlx-lm's import sets it to (2048, 4096) for good."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert tuple(in_process("")["files"]) == before


def test_what_the_process_computes_on_is_told() -> None:
    report = in_process("report['is_cpu'] = mx.default_device().type == mx.DeviceType.cpu")
    assert report["float32"] == report["is_cpu"]
    assert report["accelerator"]
    assert report["device"] >= 0
