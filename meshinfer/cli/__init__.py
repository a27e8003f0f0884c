"""The command line: what a person types, and what a script reads.

    up                       runs the agent (the only command that loads it)
    join, invite             the mesh key of a home: files, no agent needed
    models                   the models of a home: files and downloads, no agent needed
    status, plan, chat, unload
                             ask a running agent over HTTP, as any other client would

Each command is a module that reads options, asks, and shows the answer; nothing is decided here.
Modules import what is heavy inside their functions, so that `meshinfer --help` stays under 0.3 s:
the agent alone takes seconds to import.

Exit code 0: done. 1: it could not be done; standard error says why and what to do. 2: the command
line itself was wrong. Standard output carries answers only, so that `--json` can be piped.
"""

from __future__ import annotations

from meshinfer.cli.app import app


def main() -> None:
    """The `meshinfer` command."""
    app()
