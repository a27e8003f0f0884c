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
    """Draws each part of a job as a bar; one line a part where there is no terminal."""
    drawn = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=err,
    )
    current: tuple[str, TaskID] | None = None

    def show(moment: job.Progress) -> None:
        nonlocal current
        total = moment.total_bytes or None
        if current is None or current[0] != moment.what:
            _complete(drawn, current)
            current = (moment.what, drawn.add_task(moment.what, total=total))
            if not err.is_terminal:
                err.print(moment.what, soft_wrap=True)
        drawn.update(current[1], completed=moment.done_bytes, total=total)

    if not err.is_terminal:
        yield show
        return
    with drawn:
        yield show
        _complete(drawn, current)


def _complete(drawn: Progress, part: tuple[str, TaskID] | None) -> None:
    """A part that has ended is whole, also if its last moment was not shown."""
    if part is not None:
        total = drawn.tasks[drawn.task_ids.index(part[1])].total
        drawn.update(part[1], completed=total or 1, total=total or 1)
