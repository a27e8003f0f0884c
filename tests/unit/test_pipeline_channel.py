"""Frames get through between threads, whoever is slow is let go, and the mailbox knows what is urgent."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from meshinfer.pipeline.channel import OUTBOX_FRAMES, Channel
from meshinfer.pipeline.mailbox import ORIGINS_LANE_RECORDS, Arrived, Broken, Mailbox, Opened
from meshinfer.transport.certificates import make_certificate
from meshinfer.transport.tls import WELCOME, Listener, SecureSocket, dial
from meshinfer.wire.frames import Frame, FrameKind, Tensor, TensorSpec, encode_frame
from meshinfer.wire.messages import ChannelOffer, ChannelRole
from meshinfer.wire.runner_control import ExpectChannel, OriginGone

PATIENCE = 20.0
STRANGE = Frame(FrameKind.ANSWER, 0, 1, b"")


@dataclass
class Pair:
    mine: SecureSocket
    theirs: SecureSocket


@pytest.fixture
def pair() -> Iterator[Pair]:
    accepted: queue.Queue[SecureSocket] = queue.Queue()
    server, client = make_certificate(), make_certificate()

    def admit(_expected: ExpectChannel, secure: SecureSocket) -> None:
        secure.send_all(WELCOME)
        accepted.put(secure)

    listener = Listener("127.0.0.1", server, admit)
    listener.expect(ExpectChannel("origin", -1, client.der, b"t" * 32, 60.0))
    mine = dial(ChannelOffer(("127.0.0.1",), listener.port, server.der, b"t" * 32), client, PATIENCE)
    pair = Pair(mine, accepted.get(timeout=PATIENCE))
    yield pair
    listener.close()
    for secure in (pair.mine, pair.theirs):
        secure.shut_down()
        secure.close()


class Seen:
    def __init__(self) -> None:
        self.frames: queue.Queue[Frame] = queue.Queue()
        self.ends: queue.Queue[str] = queue.Queue()


def started(role: ChannelRole, secure: SecureSocket, *, dialled: bool, seen: Seen) -> Channel:
    channel = Channel(role, 0, "peer", secure, dialled=dialled)
    channel.start(1 << 24, seen.frames.put, seen.ends.put)
    return channel


def test_large_and_small_frames_arrive_as_they_were(pair: Pair):
    sender, receiver = Seen(), Seen()
    out = started("activations", pair.mine, dialled=True, seen=sender)
    started("activations", pair.theirs, dialled=False, seen=receiver)
    spec = TensorSpec("float32", (3, 500, 700))
    large = Tensor(spec, memoryview(bytes(range(256)) * (spec.size_bytes // 256 + 1))[: spec.size_bytes])
    frames = [Frame(FrameKind.STEP, 1, n, b"c" * n, (large,) if n % 2 else ()) for n in range(6)]
    assert all(out.send(frame) for frame in frames)
    assert [receiver.frames.get(timeout=PATIENCE) for _ in frames] == frames
    out.end("enough")
    assert sender.ends.get(timeout=PATIENCE) == "enough"
    assert receiver.ends.get(timeout=PATIENCE)
    assert not out.send(frames[0])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mishap", [KeyError("a bug"), MemoryError()])
def test_whatever_ends_its_thread_ends_the_channel(pair: Pair, mishap: Exception):
    """Else it would look sound, and everybody would wait for what comes no more."""

    def deliver(_frame: Frame) -> None:
        raise mishap

    sender, receiver = Seen(), Seen()
    out = started("activations", pair.mine, dialled=True, seen=sender)
    Channel("activations", 0, "peer", pair.theirs, dialled=False).start(1 << 24, deliver, receiver.ends.put)
    out.send(Frame(FrameKind.STEP, 1, 1, b""))
    assert type(mishap).__name__ in receiver.ends.get(timeout=PATIENCE)
    assert sender.ends.get(timeout=PATIENCE)


def test_what_waits_is_sent_before_it_finishes(pair: Pair):
    sender = Seen()
    channel = started("origin", pair.mine, dialled=True, seen=sender)
    frames = [Frame(FrameKind.RECORD, 0, 0, bytes([n]) * 60_000) for n in range(100)]  # more than the socket holds
    assert all(channel.send(frame) for frame in frames)
    channel.finish("its last word is said")
    assert not channel.send(frames[0])
    receiver = Seen()
    started("origin", pair.theirs, dialled=False, seen=receiver)  # only now somebody reads
    assert [receiver.frames.get(timeout=PATIENCE) for _ in frames] == frames
    assert sender.ends.get(timeout=PATIENCE) == "its last word is said"
    assert receiver.ends.get(timeout=PATIENCE)


def test_a_frame_of_another_role_ends_it(pair: Pair):
    seen = Seen()
    started("activations", pair.theirs, dialled=False, seen=seen)
    pair.mine.send_all(encode_frame(STRANGE)[0])
    assert "kind 2" in seen.ends.get(timeout=PATIENCE)


def test_whoever_dialled_an_activations_channel_hears_nothing_on_it(pair: Pair):
    seen = Seen()
    started("activations", pair.mine, dialled=True, seen=seen)
    pair.theirs.send_all(encode_frame(Frame(FrameKind.STEP, 0, 1, b""))[0])
    assert "kind 1" in seen.ends.get(timeout=PATIENCE)


def test_a_peer_that_reads_nothing_is_let_go(pair: Pair):
    seen = Seen()
    channel = started("origin", pair.theirs, dialled=False, seen=seen)
    frame = Frame(FrameKind.RECORD, 0, 0, bytes(60_000))
    sent = 0
    while channel.send(frame):
        sent += 1
    assert sent >= OUTBOX_FRAMES["origin"]
    assert "frames behind" in seen.ends.get(timeout=PATIENCE)
    assert seen.ends.empty()


def test_seats_mail_comes_before_origins_mail(pair: Pair):
    mailbox = Mailbox()
    origin = Channel("origin", -1, "o", pair.mine, dialled=False)
    seat = Channel("samples", 2, "s", pair.theirs, dialled=False)
    record, answer = Frame(FrameKind.RECORD, 0, 0, b""), STRANGE
    mailbox.put(Arrived(origin, record))
    mailbox.put(Broken("origin", -1, "gone", origin))
    mailbox.put(OriginGone(b"of o"))
    mailbox.put(Opened(origin))
    mailbox.put(Arrived(seat, answer))
    assert mailbox.take(0) == OriginGone(b"of o")  # of the channel before: it must not end this one
    assert mailbox.take(0) == Opened(origin)
    assert mailbox.take(0, seats_only=True) == Arrived(seat, answer)
    assert mailbox.take(0, seats_only=True) is None
    assert mailbox.take(0) == Arrived(origin, record)
    assert mailbox.take(0) == Broken("origin", -1, "gone", origin)
    assert mailbox.take(0) is None


def test_a_full_lane_holds_its_reader_and_no_other(pair: Pair):
    mailbox = Mailbox()
    origin = Channel("origin", -1, "o", pair.mine, dialled=False)
    mail = Arrived(origin, Frame(FrameKind.RECORD, 0, 0, b""))
    for _ in range(ORIGINS_LANE_RECORDS):
        mailbox.put(mail)
    held = threading.Thread(target=mailbox.put, args=(mail,))
    held.start()
    seat = Arrived(Channel("samples", 2, "s", pair.theirs, dialled=False), STRANGE)
    mailbox.put(seat)
    assert mailbox.take(PATIENCE) == seat
    assert held.is_alive()
    for _ in range(ORIGINS_LANE_RECORDS + 1):
        assert mailbox.take(PATIENCE) == mail
    held.join(PATIENCE)
    assert not held.is_alive()
