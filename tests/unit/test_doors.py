"""Around a rebinding: a channel of the old epoch never takes the place of one of the new."""

from __future__ import annotations

import secrets
from typing import Any, cast

import pytest

from meshinfer.base.errors import Refused
from meshinfer.base.ids import ModelId, NodeId
from meshinfer.pipeline.doors import Doors
from meshinfer.pipeline.mailbox import Broken, Mailbox, Opened
from meshinfer.topology.placement import Placement, Seat
from meshinfer.transport.certificates import make_certificate
from meshinfer.transport.tls import WELCOME, SecureSocket
from meshinfer.wire.messages import ChannelOffer
from meshinfer.wire.runner_control import DialChannel, ExpectChannel, Rebind


class Socket:
    def __init__(self) -> None:
        self.sent = b""

    def send_all(self, data: bytes) -> None:
        self.sent += data


def test_whoever_was_let_in_by_the_old_epoch_comes_too_late() -> None:
    mailbox = Mailbox()
    doors = Doors("127.0.0.1", mailbox)
    certificate = make_certificate().der
    placement = Placement(ModelId("m"), "digest", 2, "pipeline", "libp2p", 64, 1, (Seat(NodeId("n"), 0, 2),))
    rebind = Rebind(2, placement, 0)

    def expected() -> ExpectChannel:
        message = ExpectChannel("samples", 1, certificate, secrets.token_bytes(32), 10.0)
        doors.expect(message)
        return message

    def come(message: ExpectChannel) -> bytes:
        """As the listener says, once its token was shown."""
        secure: Any = Socket()
        doors._admit(message, cast("SecureSocket", secure))
        return secure.sent

    first, late = expected(), expected()
    assert come(first) == WELCOME
    doors.rebind(rebind)
    with pytest.raises(Refused, match="over"):
        come(late)
    assert come(expected()) == WELCOME
    mail = [mailbox.take(0) for _ in range(4)]
    assert [type(letter) for letter in mail] == [Opened, Rebind, Opened, type(None)]
    doors._listener.close()


def test_whatever_ends_the_dialling_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> SecureSocket:
        raise OSError("too many open files")

    monkeypatch.setattr("meshinfer.pipeline.doors.dial", fails)
    mailbox = Mailbox()
    doors = Doors("127.0.0.1", mailbox)
    offer = ChannelOffer(("127.0.0.1",), 1, make_certificate().der, bytes(32))
    doors.dial(DialChannel("activations", 1, offer))
    assert mailbox.take(10.0) == Broken("activations", 1, "too many open files")
    doors._listener.close()
