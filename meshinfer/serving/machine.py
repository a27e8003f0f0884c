"""What this machine can give: memory, cores, and what its engine says of itself.

The engine is asked in a process of its own (the agent never loads MLX); that takes 1 to 2 s, so the
answer is kept in the home, under the versions and the machine that it is true for.
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import trio

from meshinfer.base.errors import DeadlineExceeded, MeshinferError
from meshinfer.base.files import write_atomically
from meshinfer.base.ids import digest_hex
from meshinfer.models.engine_process import engine_command, run_engine
from meshinfer.serving.available_memory import available_bytes

log = logging.getLogger(__name__)

ENGINE_ANSWER_SECONDS = 60.0
"""For importing MLX in a fresh process: 2 s, more on a cold disk or a busy machine."""
_SEE = f"run it again; see {' '.join(engine_command('accelerator'))}"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine says of this machine."""

    accelerator: str
    computes_float32: bool
    device_memory_bytes: int | None
    """None: it computes in main memory."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a node's card says of its machine."""

    platform: str
    accelerator: str
    computes_float32: bool
    cpu_cores: int
    memory_total_bytes: int
    memory_usable_bytes: int


async def measure_machine(home: Path, memory_limit_bytes: int, memory_reserve: float) -> MachineFacts:
    """The facts, with usable memory as the operator's limit, or else what is available now less the reserve.

    Raises:
        MeshinferError: the engine cannot be loaded, with its own words.
    """
    engine = await _engine_facts(home)
    memory = psutil.virtual_memory()
    available = int(available_bytes() * (1 - memory_reserve))
    if engine.device_memory_bytes is not None:
        available = min(available, int(engine.device_memory_bytes * (1 - memory_reserve)))
    return MachineFacts(
        platform=f"{platform.system()} {platform.machine()}",
        accelerator=engine.accelerator,
        computes_float32=engine.computes_float32,
        cpu_cores=psutil.cpu_count() or 1,
        memory_total_bytes=memory.total,
        memory_usable_bytes=min(memory_limit_bytes, memory.total) if memory_limit_bytes else available,
    )


async def _engine_facts(home: Path) -> EngineFacts:
    key = await trio.to_thread.run_sync(_key)
    remembered = home / "engine.json"
    facts = await trio.to_thread.run_sync(_recall, remembered, key)
    if facts is None:
        facts = await _ask_engine()
        text = json.dumps({"key": key, "facts": asdict(facts)})
        try:
            await trio.to_thread.run_sync(write_atomically, remembered, text.encode())
        except OSError as error:
            log.warning("cannot write %s (%s); the next start will ask the engine again", remembered, error)
    return facts


def _key() -> str:
    """What the answer is true for."""
    versions = [importlib.metadata.version(name) for name in ("meshinfer", "mlx", "mlx-lm")]
    return digest_hex("|".join([*versions, platform.platform(), sys.executable]).encode())


def _recall(remembered: Path, key: str) -> EngineFacts | None:
    try:
        kept = json.loads(remembered.read_bytes())
        return _facts_from(kept["facts"]) if kept["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not asked yet, or by another version: ask


async def _ask_engine() -> EngineFacts:
    try:
        done = await run_engine(["accelerator"], ENGINE_ANSWER_SECONDS)
    except OSError as error:
        raise MeshinferError(f"the engine cannot be started: {error}", do=_SEE) from error
    if done is None:
        raise DeadlineExceeded(f"the engine gave no answer within {ENGINE_ANSWER_SECONDS:.0f} s", do=_SEE)
    output, complaints = (text.decode(errors="replace").strip() for text in (done.stdout, done.stderr))
    if done.returncode != 0:
        raise MeshinferError(
            f"the engine cannot be loaded: {(complaints or output)[-500:] or 'it said nothing'}",
            do="reinstall meshinfer in a fresh environment",
        )
    try:
        return _facts_from(json.loads(output.rpartition("\n")[2]))
    except (ValueError, KeyError, TypeError) as error:
        raise MeshinferError(f"the engine gave no usable answer ({error})", do=_SEE) from error


def _facts_from(answer: dict[str, Any]) -> EngineFacts:
    memory = answer["device_memory_bytes"]
    return EngineFacts(
        str(answer["accelerator"])[:128], bool(answer["computes_float32"]), None if memory is None else int(memory)
    )
