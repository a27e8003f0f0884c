"""`meshinfer version`."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Annotated

import typer

from meshinfer import __version__
from meshinfer.cli.options import JsonOption
from meshinfer.cli.terminal import out, print_json

# What a report of a problem should name: the libraries that we pin, and why.
_PINNED = ("libp2p", "mlx", "mlx-lm")


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def with_version_option(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="As `meshinfer version`."),
    ] = False,
) -> None:
    """The laptops in the room become one model server. Start with `meshinfer up`."""


def version(as_json: JsonOption = False) -> None:
    """Which version this is, and of what it stands on."""
    versions = {"meshinfer": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PINNED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    if as_json:
        print_json(versions)
        return
    out.print(f"meshinfer {__version__}")
    out.print(
        ", ".join(f"{name} {found}" for name, found in versions.items() if name != "meshinfer"),
        style="dim",
        soft_wrap=True,
    )
