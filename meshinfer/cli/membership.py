"""`meshinfer join` and `meshinfer invite`: the join code of a home."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.text import Text

from meshinfer.base.errors import Refused
from meshinfer.cli.hints import with_home
from meshinfer.cli.options import HomeOption, JsonOption, home_or_default
from meshinfer.cli.terminal import err, out, print_json

# ruff: noqa: PLC0415 - what a command needs is loaded when it runs, so that the others start fast


def join(
    code: Annotated[
        list[str],
        typer.Argument(
            metavar="CODE", help="The code that `meshinfer up` or `meshinfer invite` shows on another laptop."
        ),
    ],
    home: HomeOption = None,
) -> None:
    """Remember a mesh's join code. Once on each laptop; then `meshinfer up`."""
    from meshinfer.transport import mesh_key
    from meshinfer.transport.home_lock import agent_runs

    place = home_or_default(home)
    mesh_key.join(place, " ".join(code))
    err.print(with_home("Remembered. From now on `meshinfer up` joins that mesh.", home), soft_wrap=True)
    if agent_runs(place):
        err.print("The agent that runs here keeps its mesh until it is started again.", style="yellow")


def invite(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Print this mesh's join code, and what to run on the other laptops."""
    from meshinfer.transport import mesh_key

    place = home_or_default(home)
    code = mesh_key.remembered_code(place)
    if code is None:
        raise Refused(f"{place} belongs to no mesh yet", do="`meshinfer up` makes one, `meshinfer join CODE` joins one")
    if os.environ.get(mesh_key.JOIN_CODE_VARIABLE):
        told = f"{mesh_key.JOIN_CODE_VARIABLE} is set: `meshinfer up` uses that code, not this one."
        err.print(with_home(told, home), style="yellow", soft_wrap=True)
    if as_json:
        print_json({"join_code": code.reveal()})
        return
    print_invitation(code.reveal())


def print_invitation(code: str) -> None:
    """The code, and the two lines for the other laptops; what is copied is never wrapped."""
    for label, text in (
        ("Join code", code),
        ("On every other laptop, once", f"meshinfer join {code}"),
        ("and then", "meshinfer up"),
    ):
        out.print(Text(f"{label:<30}", style="dim") + Text(text), soft_wrap=True)
