"""An origin's channel to a runner: the agent's side of `transport.tls`, on trio.

It carries records only (`wire.records`): sessions out, tokens in, a few hundred bytes each. Many
sessions share one channel; who gets which record is the caller's business.
"""

from __future__ import annotations

import ssl

import trio

from meshinfer.base.errors import MeshinferError, PeerLost, Refused
from meshinfer.transport.certificates import Certificate, client_context
from meshinfer.transport.dialling import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    Unanswered,
    is_unanswered,
    most_telling,
    of_a_dial,
    retry_pauses,
)
from meshinfer.transport.tls import WELCOME, keep_alive
from meshinfer.wire.frames import Frame, FrameKind, FrameReader, encode_frame
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.records import MAX_RECORD_BYTES, ORIGIN_RECORDS, RUNNER_RECORDS, OriginRecord, RunnerRecord

STALL_SECONDS = 5.0
"""For the socket to take PIECE_BYTES: 26 kbit/s. A runner reads even while it computes, so one that takes less is not
there any more, or its line is of no use. A record has no deadline else: a prompt of 2²² tokens is 20 MB, 160 s at 1 Mbit/s."""
PIECE_BYTES = 16 * 1024
"""A TLS record."""


class OriginChannel:
    """Records to and from one runner. One task sends, one receives."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._reader = FrameReader((FrameKind.RECORD,))
        self._unread = memoryview(b"")

    async def send(self, record: OriginRecord) -> None:
        """Send one record; cancelled in the middle of it, the channel is of no use any more.

        Raises:
            PeerLost: the channel is gone, or the runner takes nothing any more; then it is closed.
        """
        (data,) = encode_frame(Frame(FrameKind.RECORD, 0, 0, ORIGIN_RECORDS.encode(record)))
        try:
            for start in range(0, len(data), PIECE_BYTES):
                with trio.fail_after(STALL_SECONDS):
                    await self._stream.send_all(data[start : start + PIECE_BYTES])
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
            await trio.aclose_forcefully(self._stream)
            is_slow = isinstance(error, trio.TooSlowError)
            what = (
                f"the runner took nothing for {STALL_SECONDS:.0f} s" if is_slow else "the channel to the runner is gone"
            )
            raise PeerLost(what) from error

    async def receive(self) -> RunnerRecord:
        """The next record; may be cancelled at any time without harm.

        Raises:
            PeerLost: the channel is gone.
            ProtocolError: what came is no record; the channel is of no use any more.
        """
        while True:
            while self._unread:
                buffer = self._reader.buffer()
                count = min(len(buffer), len(self._unread))
                buffer[:count] = self._unread[:count]
                self._unread = self._unread[count:]
                if (frame := self._reader.advance(count)) is not None:
                    return RUNNER_RECORDS.decode(frame.control, MAX_RECORD_BYTES)
            try:
                data = await self._stream.receive_some(PIECE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise PeerLost("the channel to the runner broke") from error
            if not data:
                raise PeerLost("the runner closed the channel")
            self._unread = memoryview(data)

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)


async def open_origin_channel(
    offer: ChannelOffer, certificate: Certificate, *, timeout_seconds: float
) -> OriginChannel:
    """Open the offered channel; the runner knows of it when this returns. Tries again until the time is up, as long as
    anything is answered.

    Args:
        offer: from the runner's agent.
        certificate: this origin's own, whose `der` that agent was told. The same for all channels to one
            instance: its fingerprint tells the last stage whose the head's sessions are.
        timeout_seconds: for all of it.

    Raises:
        Unanswered: see `transport.dialling.is_unanswered`.
        PeerLost: nothing at the offer's addresses, or somebody else, or no answer in time.
        Refused: the token did not work (used, lapsed, or meant for somebody else).
    """
    context = client_context(certificate, offer.certificate_der)
    failures: list[MeshinferError] = [PeerLost("no answer in time")]
    began = trio.current_time()
    with trio.move_on_after(timeout_seconds):
        for pause in retry_pauses():
            attempts: list[MeshinferError] = []
            for host in offer.hosts:
                failures = attempts or failures  # the time may be up before this round is
                try:
                    with trio.fail_after(CONNECT_SECONDS):
                        plain = await trio.open_tcp_stream(host, offer.port)
                    return OriginChannel(await _welcomed(plain, context, offer))
                except (PeerLost, Refused) as error:
                    attempts.append(error)
                except trio.TooSlowError:
                    attempts.append(Unanswered(f"{host} port {offer.port}: no answer"))
                except OSError as error:
                    cause = error.__cause__  # what trio says itself has no number
                    kind = of_a_dial(cause if isinstance(cause, OSError) else error)
                    attempts.append(kind(f"{host} port {offer.port}: {error}"))
            failures = attempts
            if is_unanswered(failures) and trio.current_time() >= began + ANSWER_SECONDS:
                break
            await trio.sleep(pause)
    raise most_telling(failures)


async def _welcomed(
    plain: trio.SocketStream, context: ssl.SSLContext, offer: ChannelOffer
) -> trio.SSLStream[trio.SocketStream]:
    stream = trio.SSLStream(plain, context, https_compatible=True)
    welcomed = False
    try:
        keep_alive(plain.setsockopt)
        with trio.fail_after(ANSWER_SECONDS):
            await stream.do_handshake()
        await stream.send_all(bytes([len(offer.token)]) + offer.token)
        welcome = await stream.receive_some(len(WELCOME))
        if bytes(welcome) != WELCOME or stream.getpeercert(binary_form=True) != offer.certificate_der:
            raise Refused("the channel was refused", expected="a token that has not been used and has not lapsed")
        welcomed = True
    except trio.BrokenResourceError as error:
        raise PeerLost(f"no channel: {error.__cause__ or error}") from error
    finally:
        if not welcomed:
            await trio.aclose_forcefully(stream)
    return stream
