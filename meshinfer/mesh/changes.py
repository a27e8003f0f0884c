"""A signal that several tasks may await, each at its own pace.

A reader that is busy misses nothing but the count: however often `notify` is called meanwhile, it
wakes once and then looks at the state itself. So there is no queue, and nothing to bound.
"""

from __future__ import annotations

import trio


class Changes:
    """The writer's end: `notify()` wakes every reader that waits or will look next."""

    def __init__(self) -> None:
        self.count = 0
        self.event = trio.Event()
        """Set when `count` next rises; a new one takes its place."""

    def notify(self) -> None:
        self.count += 1
        self.event.set()
        self.event = trio.Event()

    def watch(self) -> Watch:
        """A reader that is up to date now."""
        return Watch(self)


class Watch:
    """One reader's end: `await watch.changed()`, or `async for _ in watch`."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes
        self._seen = changes.count

    async def changed(self) -> None:
        """Returns once something has changed since the last return (or since this watch was made)."""
        if self._changes.count == self._seen:
            await self._changes.event.wait()
        else:
            await trio.lowlevel.checkpoint()
        self._seen = self._changes.count

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> None:
        await self.changed()
