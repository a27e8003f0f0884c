"""How things look on a terminal, and how they are said where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from meshinfer.base.errors import MeshinferError
from meshinfer.cli.hints import with_home

# markup=False: names and errors come from other nodes, and a bracket in them is a bracket.
out = Console(highlight=False, markup=False)
"""Answers."""
err = Console(stderr=True, highlight=False, markup=False)
"""Everything else: progress, errors, advice."""


def printable(text: str) -> str:
    """`text` without control characters, which a terminal would obey; lines and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


class Steps:
    """What a start that takes a while is at: on a terminal one line that changes, else a line for each step."""

    def __init__(self) -> None:
        self._line = err.status("")

    def tell(self, step: str) -> None:
        if err.is_terminal:
            self._line.update(step)
            self._line.start()
        else:
            err.print(step, soft_wrap=True)

    def stop(self) -> None:
        self._line.stop()


def show_error(error: MeshinferError, home: Path | None) -> None:
    """One panel for a person; plain lines for a log. `home`: that the user named."""
    lines = [Text(printable(with_home(error.what, home)))]
    if error.expected:
        lines.append(Text(printable(f"Expected: {error.expected}"), style="dim"))
    if error.do:
        advice = with_home(f"{error.do[:1].upper()}{error.do[1:].rstrip('.')}.", home)
        lines.append(Text(printable(advice), style="bold"))
    if err.is_terminal:
        err.print(Panel(Group(*lines), title="meshinfer", title_align="left", border_style="red"))
    else:
        for index, line in enumerate(lines):
            err.print(line if index else Text("meshinfer: ") + line, soft_wrap=True)


def print_json(value: Any) -> None:
    """`value` for a script: one document, indented, not wrapped, not coloured."""
    out.file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
