"""Options that several commands share, and how their text becomes values.

A value that cannot be read is a wrong command line (exit code 2), not a failed command.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from meshinfer.base.errors import BadInput
from meshinfer.base.ids import ModelId
from meshinfer.base.units import parse_bytes
from meshinfer.config import default_home

Value = TypeVar("Value")

DEFAULT_API_URL = "http://127.0.0.1:52415"


def reads(parse: Callable[[str], Value], named: str) -> Callable[[str], Value]:
    def read(text: str) -> Value:
        try:
            return parse(text)
        except BadInput as error:
            raise typer.BadParameter(str(error)) from error

    read.__name__ = named  # what `--help` calls this kind of value
    return read


memory_size = reads(parse_bytes, "SIZE")


def _model_id(text: str) -> ModelId:
    from meshinfer.models.catalogue import parse_model_name  # noqa: PLC0415 - 0.2 s that `--help` does not need

    return parse_model_name(text)


_HOME = "meshinfer.home"


def _note_home(context: typer.Context, home: Path | None) -> Path | None:
    context.meta[_HOME] = home
    return home


def home_named(context: typer.Context) -> Path | None:
    """What `--home` the command line had, if any, for whoever shows its errors."""
    return context.meta.get(_HOME)


ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        parser=reads(_model_id, "MODEL"),
        help="A name from `meshinfer models list`, or a full `owner/name`.",
    ),
]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        callback=_note_home,
        metavar="DIRECTORY",
        envvar="MESHINFER_HOME",
        show_default="this platform's data directory",
        file_okay=False,
        help="Where this node's identity, mesh key and models live. One agent per home.",
    ),
]
ApiOption = Annotated[
    str | None,
    typer.Option(
        "--api",
        envvar="MESHINFER_API",
        metavar="URL",
        show_default="that of the home",
        help="The agent to ask, if it is another.",
    ),
]
ApiKeyOption = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar="MESHINFER_API_KEY",
        metavar="KEY",
        show_default=False,
        help="That agent's API key, if it wants one.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same facts as JSON, for scripts.")]


def home_or_default(home: Path | None) -> Path:
    return home or default_home()
