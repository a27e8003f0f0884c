"""Where the MLX thread finds what other threads brought: one mailbox with two lanes.

The *seats* lane has steps and answers of the neighbours, channels that opened or broke, and the agent's
word that this is another epoch's seat now, or that an origin has vanished; the *origins* lane has records of origins,
and the end of their channels. They are apart because the head, in the middle of a step, waits for an answer
and must get past any number of waiting requests to find it.

Both are bounded: a reader thread whose lane is full waits, stops reading, and TCP lets the sender feel it.
What other threads cannot wait for (a channel's opening or end) always has a place.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

from meshinfer.pipeline.channel import Channel
from meshinfer.wire.frames import Frame
from meshinfer.wire.messages import ChannelRole
from meshinfer.wire.runner_control import OriginGone, Rebind

SEATS_LANE_FRAMES = 4
"""The head has one step per stage on its way, so more than a few never wait here; prefill activations are large."""
ORIGINS_LANE_RECORDS = 256
"""Enough for every origin to open and cancel a session; each may hold a prompt."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A channel is open; whoever gets this starts it."""

    channel: Channel


@dataclass(frozen=True, slots=True)
class Arrived:
    channel: Channel
    frame: Frame


@dataclass(frozen=True, slots=True)
class Broken:
    """A channel has ended, or could not be opened."""

    role: ChannelRole
    seat: int
    reason: str
    channel: Channel | None = None
    unanswered: bool = False
    """It was dialled, and nothing came back."""


Mail = Opened | Arrived | Broken | Rebind | OriginGone


class Mailbox:
    """Filled by reader threads, emptied by the MLX thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._seats: deque[Mail] = deque()
        self._origins: deque[Mail] = deque()

    def put(self, mail: Mail) -> None:
        """Leave `mail`; a frame waits for its place."""
        with self._changed:
            # The end of an origin's channel stands behind its records; its opening before any step of its sessions. That
            # its node has vanished is of the channel before, and must not come behind the opening of the one after.
            if _is_of_origins(mail):
                lane, limit = self._origins, ORIGINS_LANE_RECORDS
            else:
                lane, limit = self._seats, SEATS_LANE_FRAMES
            if isinstance(mail, Arrived):
                self._changed.wait_for(lambda: len(lane) < limit)
            lane.append(mail)
            self._changed.notify_all()

    def take(self, timeout_seconds: float, *, seats_only: bool = False) -> Mail | None:
        """The next mail, the seats' before the origins'; None if none comes in time."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while not self._seats and (seats_only or not self._origins):
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            mail = self._seats.popleft() if self._seats else self._origins.popleft()
            self._changed.notify_all()
            return mail


def _is_of_origins(mail: Mail) -> bool:
    match mail:
        case Opened() | Rebind() | OriginGone():
            return False
        case Broken(role):
            return role == "origin"
        case Arrived(channel):
            return channel.role == "origin"
