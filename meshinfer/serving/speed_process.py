"""A speed probe in a process of its own, and the fingerprint of the machine that its numbers are true for."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from dataclasses import dataclass

import msgspec
import psutil

from meshinfer.base.errors import DeadlineExceeded, MeshinferError
from meshinfer.base.ids import digest_hex
from meshinfer.models.engine_process import run_engine
from meshinfer.serving.battery import battery
from meshinfer.wire.speed_probe import LayerShape, SpeedReport

MEASURING_SECONDS = 5.0
"""Of one probe, for all kinds together, once its process is up. Longer gives steadier numbers and a warmer laptop."""
ANSWER_SECONDS = 60.0
"""For a probe's process to start, measure and answer: 7 s, several times that on a busy machine."""


@dataclass(frozen=True, slots=True)
class ProbeQuestion:
    """What a probe is to find out."""

    kinds: tuple[tuple[str, LayerShape], ...]
    memory_bytes: int
    """To be tried; 0: not now."""


def machine_fingerprint(accelerator: str) -> str:
    """What a speed depends on and does not change by itself from minute to minute."""
    versions: list[str] = []
    for name in ("mlx", "mlx-lm", "scipy-openblas32"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {name}")
    settings = [f"{name}={os.environ.get(name, '')}" for name in ("MESHINFER_BLAS", "OPENBLAS_NUM_THREADS")]
    machine = [platform.machine(), accelerator, str(psutil.cpu_count()), str(psutil.virtual_memory().total)]
    return digest_hex("|".join([*machine, *versions, *settings, _power_source()]).encode())


def _power_source() -> str:
    now = battery()
    return "unknown" if now is None else "plugged in" if now.plugged_in else "on battery"


async def ask_process(question: ProbeQuestion) -> SpeedReport:
    """Run a probe in a process of its own; cancelled, it is killed.

    Raises:
        DeadlineExceeded: no answer within ANSWER_SECONDS.
        MeshinferError: with its last words.
    """
    arguments = ["speed", "--seconds", str(MEASURING_SECONDS)]
    arguments += ["--kinds", ",".join(kind for kind, _ in question.kinds)]
    arguments += ["--shapes", ",".join(str(shape) for _, shape in question.kinds)]
    arguments += ["--memory-bytes", str(question.memory_bytes)]
    try:
        done = await run_engine(arguments, ANSWER_SECONDS)
    except OSError as error:
        raise MeshinferError(f"a speed probe cannot be started: {error}") from error
    if done is None:
        raise DeadlineExceeded(f"a speed probe gave no answer within {ANSWER_SECONDS:.0f} s")
    return _answer(done)


def _answer(done: subprocess.CompletedProcess[bytes]) -> SpeedReport:
    line = done.stdout.strip().rpartition(b"\n")[2]
    try:
        if done.returncode == 0:
            return msgspec.json.decode(line, type=SpeedReport)
        raise MeshinferError(str(json.loads(line)["error"]["what"]))
    except (msgspec.DecodeError, ValueError, KeyError, TypeError) as error:
        words = done.stderr.decode(errors="replace").strip()[-300:]
        raise MeshinferError(
            f"a speed probe ended with code {done.returncode}: {words or 'it said nothing'}"
        ) from error
