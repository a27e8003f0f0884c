"""Bars for long jobs, on standard error, so that standard output stays an answer."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from meshinfer.cli.terminal import err

if TYPE_CHECKING:
    from meshinfer.models import progress as job


@contextmanager
def bars() -> Generator[Callable[[job.Progress], None]]:
    """Draws each kind of work as a bar, for one file after the other; a line for each where there is no terminal."""
    drawn = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=err,
    )
    current: tuple[str, TaskID] | None = None
    """What is being done, and the bar of its kind."""

    def show(moment: job.Progress) -> None:
        nonlocal current
        total = moment.total_bytes or None
        if current is None or _kind(current[0]) != _kind(moment.what):
            _complete(drawn, current)
            current = (moment.what, drawn.add_task(moment.what, total=total))
            if not err.is_terminal:
                err.print(moment.what, soft_wrap=True)
        elif current[0] != moment.what:
            current = (moment.what, current[1])
            drawn.reset(current[1], total=total, description=moment.what)
        drawn.update(current[1], completed=moment.done_bytes, total=total)

    if not err.is_terminal:
        yield show
        return
    with drawn:
        yield show
        _complete(drawn, current)


def _kind(what: str) -> str:
    """`verifying` of `verifying model.safetensors`."""
    return what.partition(" ")[0]


def _complete(drawn: Progress, part: tuple[str, TaskID] | None) -> None:
    """A part that has ended is whole, also if its last moment was not shown."""
    if part is not None:
        total = drawn.tasks[drawn.task_ids.index(part[1])].total
        drawn.update(part[1], completed=total or 1, total=total or 1)
