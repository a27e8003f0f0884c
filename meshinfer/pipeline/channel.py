"""An open channel of a runner: a thread that reads frames, a thread that writes them.

The MLX thread never waits for the network: it leaves frames in the outbox. An outbox that is full means
that the peer does not take what it is sent; then the channel ends, because waiting would hold up everyone
else. That it has ended, for whatever reason, is told once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

from meshinfer.base.errors import MeshinferError
from meshinfer.transport.arrivals import Arrival, Arrivals
from meshinfer.transport.tls import SecureSocket
from meshinfer.wire.frames import Frame, FrameKind, FrameReader, encode_frame
from meshinfer.wire.messages import ChannelRole

OUTBOX_FRAMES: dict[ChannelRole, int] = {
    # The head has at most one step per stage on its way; more waiting here are a mistake or a stalled peer.
    "activations": 64,
    "samples": 64,
    # A token takes some 150 bytes: an origin that is 4096 of them behind has stopped reading.
    "origin": 4096,
}
JOIN_BYTES = 64 * 1024
"""Smaller frames go out in one piece: copying 64 KiB takes 5 µs, one more TLS record and packet 20 µs."""

LARGE_FRAME_BYTES = 256 * 1024
"""From here on a frame's transfer says something of the link: 16 TLS records, 20 ms at 100 Mbit/s."""
ARRIVALS_APART_SECONDS = 1.0

INCOMING: dict[tuple[ChannelRole, bool], tuple[FrameKind, ...]] = {
    ("activations", False): (FrameKind.STEP,),
    ("samples", False): (FrameKind.ANSWER,),
    ("origin", False): (FrameKind.RECORD,),
}
"""By role and whether we dialled. Between seats only the dialler sends."""


class Channel:
    """One open channel.

    Args:
        role: what it is for.
        seat: of the peer; −1 for an origin.
        peer: fingerprint of the peer's certificate.
        dialled: by us.
    """

    def __init__(self, role: ChannelRole, seat: int, peer: str, secure: SecureSocket, *, dialled: bool) -> None:
        self.role: ChannelRole = role
        self.seat = seat
        self.peer = peer
        self.dialled = dialled
        self._secure = secure
        self._outbox: queue.Queue[Frame | None] = queue.Queue(OUTBOX_FRAMES[role])
        self._lock = threading.Lock()
        self._threads = 0
        """That may still use the socket; the last one closes it."""
        self._end_reason = ""
        """Why it has ended; empty while it works."""
        self._finish_reason = ""
        """Why it ends when all has been sent; empty while it goes on."""
        self._on_end: Callable[[str], None] = lambda _reason: None

    def start(
        self,
        max_payload_bytes: int,
        deliver: Callable[[Frame], None],
        on_end: Callable[[str], None],
        on_arrival: Callable[[Arrival], None] | None = None,
    ) -> None:
        """Begin to read and write.

        Args:
            max_payload_bytes: of one incoming frame's tensors.
            deliver: called on the reader thread with each frame; while it waits, nothing more is read.
            on_end: called once, on any thread, with the reason.
            on_arrival: called on the reader thread with how fast a large frame came in, if that tells something of the
                link, at most once a second.
        """
        self._on_end = on_end
        reader = FrameReader(INCOMING.get((self.role, self.dialled), ()), max_payload_bytes)
        self._threads = 2
        for name, work in (("reads", lambda: self._read(reader, deliver, on_arrival)), ("writes", self._write)):
            threading.Thread(target=self._until_end, args=(work,), name=f"{self.role} {name}", daemon=True).start()

    def send(self, frame: Frame) -> bool:
        """Leave `frame` to be sent; False if the channel has ended, also just now because the peer reads too slowly."""
        if self._end_reason or self._finish_reason:
            return False
        try:
            self._outbox.put_nowait(frame)
        except queue.Full:
            self.end(f"the peer is {self._outbox.maxsize} frames behind")
            return False
        return True

    def finish(self, reason: str) -> None:
        """Close it when what waits has been sent: the other side hears the last word, which `end` may cut off."""
        self._finish_reason = reason
        try:
            self._outbox.put_nowait(None)
        except queue.Full:
            self.end(reason)

    def end(self, reason: str) -> None:
        """Close it at once; the other side learns no reason, only the end."""
        with self._lock:
            if self._end_reason:
                return
            self._end_reason = reason or "closed"
        self._secure.shut_down()
        with contextlib.suppress(queue.Full):  # when it is full, the writer has a frame to fail on
            self._outbox.put_nowait(None)
        self._on_end(self._end_reason)

    def _until_end(self, work: Callable[[], None]) -> None:
        try:
            work()
        except (MeshinferError, OSError, ValueError) as error:  # ValueError: closed under our hands
            self.end(str(error) or type(error).__name__)
        except BaseException as error:  # unforeseen: still nobody may wait for what this thread will never bring
            self.end(f"its thread ended: {error!r}")
            raise
        else:
            self.end(self._finish_reason or "the peer closed it")
        finally:
            with self._lock:
                self._threads -= 1
                if self._threads == 0:
                    self._secure.close()

    def _read(
        self, reader: FrameReader, deliver: Callable[[Frame], None], on_arrival: Callable[[Arrival], None] | None
    ) -> None:
        arrivals, told_at = Arrivals(time.monotonic()), float("-inf")
        while (count := self._secure.recv_into(reader.buffer())) > 0:
            now = time.monotonic()
            arrivals.came(count, now)
            if (frame := reader.advance(count)) is not None:
                arrival = arrivals.end()
                if on_arrival and now - told_at >= ARRIVALS_APART_SECONDS and arrival.tells(LARGE_FRAME_BYTES):
                    told_at = now
                    on_arrival(arrival)
                deliver(frame)
                arrivals.ready(time.monotonic())

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            pieces = encode_frame(frame)
            if sum(len(piece) for piece in pieces) <= JOIN_BYTES:
                pieces = [b"".join(pieces)]
            for piece in pieces:
                self._secure.send_all(piece)
