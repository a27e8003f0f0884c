"""`meshinfer up`: the agent, in the foreground, until somebody ends it.

Standard output says once where the agent answers and how others join; after that, the log goes to
standard error. Ctrl-C, SIGTERM and a terminal that is closed (SIGHUP) leave politely: the agent is
cancelled, says goodbye to the mesh and ends its runners. A second Ctrl-C does not wait for that; what was told to
leave and is told again goes on leaving. What has not ended long after it should have (a fault of ours) is ended, and
standard error shows where it hung.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from meshinfer.base.errors import MeshinferError
from meshinfer.base.units import format_bytes
from meshinfer.cli.hints import home_option, with_home
from meshinfer.cli.membership import print_invitation
from meshinfer.cli.options import HomeOption, home_or_default, memory_size
from meshinfer.cli.terminal import Steps, err, out
from meshinfer.config import Settings

if TYPE_CHECKING:
    import trio

    from meshinfer.agent import Started

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast

_DIAL = Settings(home=Path())
"""The defaults, said once, in config.py."""

_HARD_END_SECONDS = 90.0
"""After the wish to leave. Leaving has deadlines of its own: 48 s for answers, seats and the goodbye, 3 s for HTTP, a
few for runners."""

_IDENTITY, _NETWORK, _API, _MACHINE = "Who this is, who may come in", "Network", "HTTP API", "This machine"


def up(
    home: HomeOption = None,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            metavar="NAME",
            show_default="the host name",
            rich_help_panel=_IDENTITY,
            help="What people call this node.",
        ),
    ] = "",
    mesh_key_file: Annotated[
        Path | None,
        typer.Option(
            "--mesh-key-file",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            rich_help_panel=_IDENTITY,
            help="A file with a join code, for prepared deployments (also: MESHINFER_JOIN_CODE).",
        ),
    ] = None,
    open_mesh: Annotated[
        bool,
        typer.Option(
            "--open", rich_help_panel=_IDENTITY, help="Anyone in the network may join. For isolated networks only."
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port",
            metavar="PORT",
            min=0,
            max=65535,
            rich_help_panel=_NETWORK,
            help="Where other agents reach this one. 0: any free port.",
        ),
    ] = _DIAL.listen_port,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="HOST:PORT",
            rich_help_panel=_NETWORK,
            help="Another agent's address, where multicast is filtered. One is enough; may be repeated.",
        ),
    ] = None,
    no_discovery: Annotated[
        bool,
        typer.Option(
            "--no-discovery",
            rich_help_panel=_NETWORK,
            help="Neither announce this node on the LAN nor listen for others.",
        ),
    ] = False,
    loopback: Annotated[
        bool,
        typer.Option(
            "--loopback",
            rich_help_panel=_NETWORK,
            help="For several agents on one machine: use loopback addresses too.",
        ),
    ] = False,
    api_host: Annotated[
        str,
        typer.Option(
            "--api-host", metavar="HOST", rich_help_panel=_API, help="Any address but loopback wants an API key."
        ),
    ] = _DIAL.api_host,
    api_port: Annotated[
        int,
        typer.Option("--api-port", metavar="PORT", min=0, max=65535, rich_help_panel=_API, help="0: any free port."),
    ] = _DIAL.api_port,
    api_key: Annotated[
        str,
        typer.Option(
            "--api-key",
            envvar="MESHINFER_API_KEY",
            metavar="KEY",
            show_default=False,
            rich_help_panel=_API,
            help="What clients must present.",
        ),
    ] = "",
    api_without_key: Annotated[
        bool,
        typer.Option(
            "--api-without-key",
            rich_help_panel=_API,
            help="Serve other addresses without a key. For trusted networks only.",
        ),
    ] = False,
    memory: Annotated[
        int | None,
        typer.Option(
            "--memory",
            parser=memory_size,
            metavar="SIZE",
            show_default="what is available, less a tenth",
            rich_help_panel=_MACHINE,
            help="What models may use of this machine in all, such as 2GiB.",
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(
            "--context",
            metavar="TOKENS",
            min=1,
            rich_help_panel=_MACHINE,
            help="Tokens to reserve per conversation when a request places its model.",
        ),
    ] = _DIAL.context_tokens,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency",
            metavar="COUNT",
            min=1,
            rich_help_panel=_MACHINE,
            help="Conversations to reserve for when a request places its model.",
        ),
    ] = _DIAL.concurrency,
    leave_at_battery: Annotated[
        float,
        typer.Option(
            "--leave-at-battery",
            metavar="PERCENT",
            min=0,
            max=100,
            rich_help_panel=_MACHINE,
            help="Leave, as with Ctrl-C, when no more is left and nothing charges it. 0: stay to the end.",
        ),
    ] = _DIAL.leave_at_battery_percent,
    as_json: Annotated[
        bool, typer.Option("--json", help="Say what started as one line of JSON, for the script that started it.")
    ] = False,
    with_stdin: Annotated[
        bool,
        typer.Option(
            # For programs that start agents: what holds the other end may be killed, and nothing is left behind.
            "--end-with-stdin",
            hidden=True,
            help="Leave when standard input ends.",
        ),
    ] = False,
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, show_default=False, help="Log more; twice: everything.")
    ] = 0,
) -> None:
    """Run this node's agent, until Ctrl-C; a second one does not wait for its answers.

    The first start makes a mesh and prints the code with which other laptops join it.
    """
    settings = Settings(
        home=home_or_default(home).expanduser().absolute(),
        name=name,
        open_mesh=open_mesh,
        mesh_key_file=mesh_key_file,
        listen_port=port,
        api_host=api_host,
        api_port=api_port,
        api_key=api_key,
        api_without_key=api_without_key,
        peers=tuple(peer or ()),
        discovery=not no_discovery,
        loopback=loopback,
        memory_limit_bytes=memory or 0,
        context_tokens=context,
        concurrency=concurrency,
        leave_at_battery_percent=leave_at_battery,
    )
    _log_to_stderr(verbose, settings.home)
    steps = Steps()
    try:
        _run(settings, steps, as_json=as_json, with_stdin=with_stdin)
    finally:
        steps.stop()


def _run(settings: Settings, steps: Steps, *, as_json: bool, with_stdin: bool) -> None:
    steps.tell("starting: loading libraries …")  # seconds, most of them libp2p
    import trio

    from meshinfer.agent import run_agent

    def show(started: Started) -> None:
        steps.stop()
        _show_started(started, settings, as_json=as_json)

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on_signal, nursery.cancel_scope)
            if with_stdin:
                nursery.start_soon(_cancel_at_end_of_stdin, nursery.cancel_scope)
            await run_agent(settings, lambda step: steps.tell(f"starting: {step} …"), show)
            nursery.cancel_scope.cancel()

    try:
        trio.run(run)
    except BaseExceptionGroup as group:
        if group.subgroup(KeyboardInterrupt):  # a second Ctrl-C: whoever typed it knows why
            raise typer.Exit(128 + signal.SIGINT) from None
        raise (_the_one_to_tell(group) or group) from group
    finally:
        faulthandler.cancel_dump_traceback_later()


async def _cancel_on_signal(scope: trio.CancelScope) -> None:
    """Ends the agent politely at the first signal; once this is cancelled, Ctrl-C ends it in whatever it is doing."""
    import trio

    ending = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # `nohup` means to stay
        ending.append(signal.SIGHUP)
    try:
        with trio.open_signal_receiver(*ending) as signals:
            async for _ in signals:
                with suppress(OSError):  # a terminal that is closed shows nothing any more
                    err.print("leaving …", style="dim")
                _leave(scope)
    finally:
        # `meshinfer leave` given twice, and a terminal that closes after it, only say again what is being done.
        for number in ending:
            signal.signal(number, lambda _number, _frame: None)
        # No exception: raised in the middle of a library, it may be taken for that library's own and be lost.
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))


async def _cancel_at_end_of_stdin(scope: trio.CancelScope) -> None:
    """Ends the agent politely once nobody holds the other end of its standard input."""
    import trio

    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        while await stdin.receive_some():
            pass
    _leave(scope)


def _leave(scope: trio.CancelScope) -> None:
    scope.cancel()
    # By a thread of C: it works however much of this process hangs, but it wants a standard error to write to.
    with suppress(RuntimeError, OSError, ValueError):
        faulthandler.dump_traceback_later(_HARD_END_SECONDS, exit=True)


def _the_one_to_tell(group: BaseExceptionGroup[BaseException]) -> MeshinferError | None:
    """The first error that a person can act on, if the group holds no others."""
    ours, others = group.split(MeshinferError)
    while isinstance(ours, BaseExceptionGroup) and others is None:
        ours = ours.exceptions[0]
    return ours if isinstance(ours, MeshinferError) else None


def _log_to_stderr(verbose: int, home: Path) -> None:
    """Our own news; with -v more of it; with -vv what the libraries say, too."""
    from rich.logging import RichHandler

    handler: logging.Handler
    if err.is_terminal:
        handler = RichHandler(console=err, show_path=False, show_level=verbose > 0, log_time_format="%X")
        handler.setFormatter(_Formatter("%(message)s", home))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", home))
    logging.basicConfig(level=logging.DEBUG if verbose > 1 else logging.ERROR, handlers=[handler])
    logging.getLogger("meshinfer").setLevel(logging.DEBUG if verbose else logging.INFO)
    if not verbose:
        # Each request, and where it listens, which we say ourselves.
        logging.getLogger("meshinfer.http").setLevel(logging.WARNING)


class _Formatter(logging.Formatter):
    """Commands that the log advises are for this home."""

    def __init__(self, layout: str, home: Path) -> None:
        super().__init__(layout)
        self._home = home

    def format(self, record: logging.LogRecord) -> str:
        return with_home(super().format(record), self._home)


def _show_started(started: Started, settings: Settings, *, as_json: bool) -> None:
    """What a person needs once: where it answers, and how others come in."""
    if as_json:
        # One line, so that whoever started this process knows where it ends. The code stays out of it: such
        # output is kept in logs, and `meshinfer invite --json` gives the code to those who ask for it.
        facts = dataclasses.asdict(started)
        del facts["join_code"]
        out.file.write(json.dumps(facts) + "\n")
        out.file.flush()
        return
    table = Table.grid(padding=(0, 2))
    table.add_row(Text("Node", style="dim"), Text.assemble(started.name, (f"  {started.node_id}", "dim")))
    table.add_row(Text("API", style="dim"), f"{started.api_url}/v1")
    table.add_row(Text("Memory", style="dim"), f"{format_bytes(started.memory_usable_bytes)} on {started.accelerator}")
    # Those that others in the room can use, if there are any.
    addresses = [each for each in started.addresses if not each.startswith(("127.", "[::1]"))] or started.addresses
    table.add_row(Text("Address", style="dim"), Text.assemble(", ".join(addresses), ("  for --peer", "dim")))
    table.add_row(
        Text("Models", style="dim"),
        ", ".join(started.models) or with_home("none yet: `meshinfer models pull smollm2-135m`", settings.home),
    )
    at_home = home_option(settings.home)
    # Only to eyes: what is not a terminal is likely a log.
    invites = started.key_source == "made" and started.join_code is not None and out.is_terminal
    table.add_row(Text("Mesh", style="dim"), _mesh_words(started, "" if invites else f"meshinfer invite{at_home}"))
    out.print(table)
    if invites and started.join_code is not None:
        out.print()
        print_invitation(started.join_code)
    out.print()
    ways = f"meshinfer status{at_home}, meshinfer chat MODEL{at_home}"
    out.print(f"Ctrl-C ends this node. In another terminal: {ways}", style="dim", soft_wrap=True)


def _mesh_words(started: Started, invite: str) -> Text:
    """`invite`: the command that shows the join code, if that is worth saying."""
    if started.key_source == "open":
        return Text("open: anyone in this network may join")
    made = ", made just now" if started.key_source == "made" else ""
    return Text.assemble(started.mesh_id, made, (f"  `{invite}` shows how others join" if invite else "", "dim"))
