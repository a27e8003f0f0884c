"""The one composition root of the runner process: `python -m meshinfer.runner …`.

    seat --fd N               be a seat: the agent speaks over the inherited socket pair N
    describe DIRECTORY ID     print the model's card
    convert-gguf FILE TARGET  make an mlx-lm directory of a GGUF file
    accelerator               print what this machine computes on

The last three are short jobs: one JSON line on standard output; on failure it is {"error": …} and the
exit code 1. MLX is imported only after `prepare_process` has put its BLAS in place, so imports of what
uses MLX stand inside functions here.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from meshinfer.base.errors import BadInput, MeshinferError, ProtocolError
from meshinfer.base.ids import parse_model_id
from meshinfer.engine.platform import Platform, prepare_process
from meshinfer.pipeline.agent_link import AgentLink
from meshinfer.pipeline.doors import Doors
from meshinfer.pipeline.mailbox import Mailbox
from meshinfer.pipeline.progress import Progress
from meshinfer.wire.runner_control import (
    AgentMessage,
    DialChannel,
    ExpectChannel,
    Loaded,
    Loading,
    LoadSeat,
    RunnerFailed,
    StopRunner,
)

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
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s", stream=sys.stderr)
    match given.command:
        case "seat":
            be_seat(socket.socket(fileno=given.fd))
        case "describe":
            _job(lambda: _describe(given.directory, given.model_id))
        case "convert-gguf":
            _job(lambda: _convert(given.source, given.target))
        case _:
            _job(_accelerator)


# --- a seat -------------------------------------------------------------------------------------


def be_seat(connection: socket.socket) -> NoReturn:
    """Be what the agent's first message says, until the agent is gone or says stop."""
    progress, mailbox = Progress(), Mailbox()
    link = AgentLink(connection, progress)
    try:
        load = link.receive_first()
        if not isinstance(load, LoadSeat):
            raise ProtocolError(f"{type(load).__name__} from the agent", expected="LoadSeat first")  # noqa: TRY301 - told below
        doors = Doors(load.bind_host, mailbox)
        link.start(lambda message: _obey(message, doors, link))
        link.send(doors.listening)
        _work(load, mailbox, progress, link)
    except MeshinferError as error:
        link.send(RunnerFailed(error.code, error.what[:2048], error.expected[:512], error.do[:512]))
    except Exception as error:  # noqa: BLE001 - whatever it is ends this process, and its agent must learn what it was
        traceback.print_exc()
        link.send(RunnerFailed("internal", f"{type(error).__name__}: {error}"[:2048]))
    link.end_process(1)


def _obey(message: AgentMessage, doors: Doors, link: AgentLink) -> None:
    match message:
        case ExpectChannel():
            doors.expect(message)
        case DialChannel():
            doors.dial(message)
        case StopRunner():
            link.end_process(0)
        case LoadSeat():
            raise ProtocolError("a second LoadSeat", expected="one: a runner is one seat")


def _work(load: LoadSeat, mailbox: Mailbox, progress: Progress, link: AgentLink) -> None:
    """Load, then run steps for ever, on this thread: MLX's one."""
    began = time.monotonic()
    platform = prepare_process()
    logging.getLogger(__name__).info("seat %d computes on %s, %s", load.seat_index, platform.accelerator, platform.blas)
    from meshinfer.engine.loader import load_seat  # noqa: PLC0415 - after prepare_process
    from meshinfer.engine.memory import bound_freed_buffers, read_memory  # noqa: PLC0415
    from meshinfer.engine.stepping import Stepper  # noqa: PLC0415
    from meshinfer.pipeline.head import max_step_tokens  # noqa: PLC0415
    from meshinfer.pipeline.seat import Seat  # noqa: PLC0415

    spare = load.memory_limit_bytes // 8
    bound_freed_buffers(min(spare, _FREED_BUFFERS_BYTES) if spare else _FREED_BUFFERS_BYTES)
    load.placement.validate()
    place = load.placement.seats[load.seat_index]
    loaded = load_seat(
        Path(load.model_path),
        place.start,
        place.end,
        computes_float32=platform.computes_float32,
        progress=lambda done, total: link.send(Loading(done, total)),
    )
    stepper = Stepper(loaded, max_rows=load.placement.concurrency, max_tokens=max_step_tokens(load))
    memory = read_memory()
    link.send(Loaded(memory.active, memory.resident, time.monotonic() - began))
    Seat(load, stepper, mailbox, progress, link.send).run()


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


if __name__ == "__main__":
    main()
