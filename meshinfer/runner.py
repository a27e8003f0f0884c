"""The one composition root of the runner process: `python -m meshinfer.runner …`.

    seat --fd N               be a seat: the agent speaks over the inherited socket pair N
    describe DIRECTORY ID     print the model's card
    convert-gguf FILE TARGET  make an mlx-lm directory of a GGUF file
    accelerator               print what this machine computes on
    speed --kinds K,…         measure how fast it does, and how much memory it can give

The last four are short jobs: one JSON line on standard output; on failure it is {"error": …} and the
exit code 1. MLX is imported only after `prepare_process` has put its BLAS in place, so imports of what
uses MLX stand inside functions here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import queue
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec

from meshinfer.base.errors import BadInput, MeshinferError, ProtocolError
from meshinfer.base.ids import parse_model_id
from meshinfer.base.threads import end_with_a_starved_thread
from meshinfer.engine.platform import Platform, prepare_process
from meshinfer.pipeline.agent_link import AgentLink
from meshinfer.pipeline.doors import Doors
from meshinfer.pipeline.mailbox import Mailbox
from meshinfer.pipeline.progress import Progress
from meshinfer.topology.placement import Placement
from meshinfer.wire.runner_control import (
    AgentMessage,
    DialChannel,
    ExpectChannel,
    Loaded,
    Loading,
    LoadSeat,
    OriginGone,
    Rebind,
    RunnerFailed,
    StopRunner,
)
from meshinfer.wire.speed_probe import LayerShape, SpeedReport

log = logging.getLogger(__name__)

# Spare buffers that MLX keeps: enough for a prefill chunk's temporaries, an eighth of the seat's memory at most.
_FREED_BUFFERS_BYTES = 256 * 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(prog="meshinfer.runner", description="A process of an agent, not for people.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("seat").add_argument("--fd", type=int, required=True)
    describe = commands.add_parser("describe")
    describe.add_argument("directory", type=Path)
    describe.add_argument("model_id")
    convert = commands.add_parser("convert-gguf")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    commands.add_parser("accelerator")
    speed = commands.add_parser("speed")
    speed.add_argument("--kinds", default="")
    speed.add_argument("--shapes", default="", help="one for each kind, such as 576x1536x9x3x49152")
    speed.add_argument("--seconds", type=float, default=5.0)
    speed.add_argument("--memory-bytes", type=int, default=0, help="0: no trial")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    match given.command:
        case "seat":
            end_with_a_starved_thread()
            be_seat(socket.socket(fileno=given.fd))
        case "describe":
            _job(lambda: _describe(given.directory, given.model_id))
        case "convert-gguf":
            _job(lambda: _convert(given.source, given.target))
        case "speed":
            _job(lambda: _speed(given.kinds, given.shapes, given.seconds, given.memory_bytes))
        case _:
            _job(_accelerator)


# --- a seat -------------------------------------------------------------------------------------


def be_seat(connection: socket.socket) -> NoReturn:
    """Be what the agent's first message says, until the agent is gone or says stop.

    Everything is imported before that message is waited for, so that an agent can keep a process at hand.
    """
    progress, mailbox = Progress(), Mailbox()
    link = AgentLink(connection, progress)
    first: queue.Queue[LoadSeat] = queue.Queue(1)
    link.start(_Orders(mailbox, link, first).obey)
    try:
        platform = prepare_process()
        _import_engine()
        _work(platform, first.get(), mailbox, progress, link)
    except MeshinferError as error:
        link.send(RunnerFailed(error.code, error.what[:2048], error.expected[:512], error.do[:512]))
    except Exception as error:  # noqa: BLE001 - whatever it is ends this process, and its agent must learn what it was
        traceback.print_exc()
        link.send(RunnerFailed("internal", f"{type(error).__name__}: {error}"[:2048]))
    link.end_process(1)


class _Orders:
    """What the agent says, on the thread that hears it."""

    def __init__(self, mailbox: Mailbox, link: AgentLink, first: queue.Queue[LoadSeat]) -> None:
        self._mailbox = mailbox
        self._link = link
        self._first = first
        self._doors: Doors | None = None
        """Open from LoadSeat on: before it, nobody has said on which address."""

    def obey(self, message: AgentMessage) -> None:
        if isinstance(message, StopRunner):
            self._link.end_process(0)
        elif isinstance(message, LoadSeat) == (self._doors is not None):
            raise ProtocolError(f"{type(message).__name__} from the agent", expected="one LoadSeat, then the others")
        elif isinstance(message, LoadSeat):
            self._doors = Doors(message.bind_host, self._mailbox)
            self._link.send(self._doors.listening)
            self._link.beat()
            self._first.put(message)
        elif self._doors is not None:
            match message:
                case ExpectChannel():
                    self._doors.expect(message)
                case DialChannel():
                    self._doors.dial(message)
                case Rebind():
                    self._doors.rebind(message)
                case OriginGone():
                    self._mailbox.put(message)


def _import_engine() -> None:
    """What `_work` needs, 0.2 s of it beyond MLX itself, and one product, which has MLX make its threads."""
    import mlx.core as mx  # noqa: PLC0415 - after prepare_process

    for module in ("loader", "memory", "stepping"):
        importlib.import_module(f"meshinfer.engine.{module}")
    importlib.import_module("meshinfer.pipeline.seat_loop")
    mx.eval(mx.zeros((8, 8)) @ mx.zeros((8, 8)))


def _work(platform: Platform, load: LoadSeat, mailbox: Mailbox, progress: Progress, link: AgentLink) -> NoReturn:
    """Load, then run steps for ever, on this thread: MLX's one."""
    log.info("seat %d computes on %s, %s", load.seat_index, platform.accelerator, platform.blas)
    progress.timer = platform.timer
    from meshinfer.engine.loader import load_seat  # noqa: PLC0415 - after prepare_process
    from meshinfer.engine.memory import bound_freed_buffers, read_memory  # noqa: PLC0415
    from meshinfer.engine.stepping import Stepper  # noqa: PLC0415
    from meshinfer.pipeline.head import max_step_tokens  # noqa: PLC0415
    from meshinfer.pipeline.seat_loop import SeatLoop  # noqa: PLC0415

    began = time.monotonic()
    spare = load.memory_limit_bytes // 8
    bound_freed_buffers(min(spare, _FREED_BUFFERS_BYTES) if spare else _FREED_BUFFERS_BYTES)
    load.placement.validate()
    layers = _layers(load)
    loaded = load_seat(
        Path(load.model_path),
        *layers,
        computes_float32=platform.computes_float32,
        progress=lambda done, total, following: link.send(Loading(done, total, following)),
    )
    stepper = Stepper(
        loaded,
        max_rows=load.placement.concurrency,
        max_tokens=max_step_tokens(load),
        context_tokens=load.placement.context_tokens,
    )
    memory = read_memory()
    link.send(Loaded(memory.active, memory.resident, time.monotonic() - began))
    while True:
        rebind = SeatLoop(load, stepper, mailbox, progress, link.send).run()
        before = load.placement
        load = replace(load, epoch=rebind.epoch, placement=rebind.placement, seat_index=rebind.seat_index)
        load.placement.validate()
        after = load.placement
        if (_layers(load), *_terms(after)) != (layers, *_terms(before)):
            raise ProtocolError(
                f"a rebinding of layers {layers} to {_layers(load)}",
                expected="the same layers, model, context and concurrency",
            )


def _layers(load: LoadSeat) -> tuple[int, int]:
    if load.seat_index >= len(load.placement.seats):
        raise ProtocolError(f"seat {load.seat_index} of {len(load.placement.seats)}", expected="one of the placement")
    seat = load.placement.seats[load.seat_index]
    return seat.start, seat.end


def _terms(placement: Placement) -> tuple[str, int, int]:
    """What loaded layers and reserved memory are good for."""
    return placement.model_digest, placement.context_tokens, placement.concurrency


# --- short jobs ---------------------------------------------------------------------------------


def _job(work: Callable[[], str]) -> NoReturn:
    """Print what `work` returns; or its error, in the form that `models.engine_jobs` reads."""
    try:
        line, code = work(), 0
    except MeshinferError as error:
        line, code = _report(error), 1
    except OSError as error:
        line, code = _report(BadInput(str(error), expected="files that can be read and written")), 1
    except Exception as error:  # noqa: BLE001 - whatever it is ends this process, and who started it must learn what it was
        traceback.print_exc()
        line, code = _report(MeshinferError(f"{type(error).__name__}: {error}")), 1
    print(line, flush=True)  # noqa: T201 - this is the answer
    sys.stderr.flush()
    os._exit(code)  # MLX's threads may abort an orderly exit


def _report(error: MeshinferError) -> str:
    return json.dumps({"error": {"code": error.code, "what": error.what, "expected": error.expected, "do": error.do}})


def _describe(directory: Path, model_id: str) -> str:
    prepare_process()
    from meshinfer.engine.describe import describe_model  # noqa: PLC0415 - after prepare_process

    return msgspec.json.encode(describe_model(directory, parse_model_id(model_id))).decode()


def _convert(source: Path, target: Path) -> str:
    prepare_process()
    from meshinfer.engine.gguf import convert_gguf  # noqa: PLC0415 - after prepare_process

    convert_gguf(source, target)
    return json.dumps({"converted": str(target)})


def _accelerator() -> str:
    platform: Platform = prepare_process()
    return json.dumps(
        {
            "computes_float32": platform.computes_float32,
            "accelerator": platform.accelerator,
            "device_memory_bytes": platform.device_memory_bytes or None,
            "blas": platform.blas,
        }
    )


def _speed(kinds: str, shapes: str, seconds: float, memory_bytes: int) -> str:
    # Whatever a person does with this machine meanwhile comes first. Never raised again: the process is short.
    os.nice(10)
    named = [kind for kind in kinds.split(",") if kind]
    given = [LayerShape.parse(shape) for shape in shapes.split(",") if shape] or [LayerShape()] * len(named)
    if len(given) != len(named):
        raise BadInput(f"{len(given)} shapes for {len(named)} kinds", expected="one for each, or none")
    platform = prepare_process()
    from meshinfer.engine.memory_trial import TRIAL_SECONDS, try_memory  # noqa: PLC0415 - after prepare_process
    from meshinfer.engine.speed import measure_speeds  # noqa: PLC0415

    began = time.monotonic()
    for_kinds = seconds - (TRIAL_SECONDS if memory_bytes else 0.0)
    measured = measure_speeds(list(zip(named, given, strict=True)), platform, for_kinds)
    memory = try_memory(memory_bytes) if memory_bytes else None
    return msgspec.json.encode(SpeedReport(measured, memory, time.monotonic() - began)).decode()


if __name__ == "__main__":
    main()
