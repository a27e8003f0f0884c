"""Who gets an offer of a channel to a runner, and where to dial first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from meshinfer.base.errors import Refused
from meshinfer.base.ids import InstanceId, ModelId, NodeId
from meshinfer.serving.held_runner import HeldRunner
from meshinfer.serving.held_seat import SeatKey
from meshinfer.serving.seat_channels import LISTEN_WAIT_SECONDS, SeatChannels
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import OpenChannel
from meshinfer.wire.runner_control import DialChannel, ExpectChannel, Listening

ANNA, BEN, CARL = NodeId("anna"), NodeId("ben"), NodeId("carl")
PLACEMENT = Placement(
    ModelId("org/model"),
    "d" * 64,
    layer_count=4,
    strategy="pipeline",
    channel="libp2p",
    context_tokens=256,
    concurrency=1,
    seats=(Seat(ANNA, 0, 2), Seat(BEN, 2, 4)),
)
INSTANCE = InstanceId("0" * 16)
ASK = OpenChannel(INSTANCE, 1, 1, 0, "samples", b"ben's certificate")


class Runner:
    """One that listens at once, and whose socket takes all."""

    def __init__(self, port: int) -> None:
        self.listening = Listening(port, b"certificate")
        self.heard = trio.Event()
        self.heard.set()
        self.told: list[object] = []

    async def send(self, message: object) -> None:
        await trio.lowlevel.checkpoint()
        self.told.append(message)


class Node:
    """One with a runner of its seat of epoch 1; as `Ports` and their transport have it."""

    def __init__(self, node_id: NodeId, others: dict[NodeId, Node], *addresses: str) -> None:
        self.node_id = node_id
        self.others = others
        others[node_id] = self
        self.addresses = lambda: addresses
        self.transport = self
        self.settings = SimpleNamespace(call_timeout_seconds=1.0)
        self.best: dict[NodeId, str] = {}
        self.channel_host = self.best.get
        index = PLACEMENT.node_ids.index(node_id)
        self.runner = Runner(100 + index)
        self.key = SeatKey(INSTANCE, 1, index)
        self.started = trio.Event()
        self.started.set()
        self.channels = SeatChannels(cast("Any", self), self.find)

    async def find(self, key: SeatKey) -> HeldRunner | None:
        await self.started.wait()
        return HeldRunner(key, PLACEMENT, cast("Any", self.runner)) if key == self.key else None

    def serve(self, _method: str, handler: Any) -> None:
        self.handler = handler

    async def call(self, node: NodeId, _method: str, payload: bytes, _timeout: float) -> bytes:
        return await self.others[node].handler(self.node_id, payload)


@pytest.fixture
def anna() -> Node:
    """The head's node, with the last stage's as `others[BEN]`."""
    others: dict[NodeId, Node] = {}
    Node(BEN, others, "10.0.0.2:7", "[fd00::2]:7")
    return Node(ANNA, others, "192.168.0.1:9", "127.0.0.1:9", "[fd00::1]:9", "192.168.0.1:8")


async def test_hosts_are_those_of_the_node_each_once(anna: Node) -> None:
    offer = await anna.channels.offer(BEN, ASK)
    assert (offer.hosts, offer.port) == (("192.168.0.1", "127.0.0.1", "fd00::1"), 100)


async def test_this_node_s_own_dial_the_loopback_first(anna: Node) -> None:
    own = await anna.channels.ask(ANNA, OpenChannel(INSTANCE, 1, -1, 0, "origin", b"anna's certificate"))
    assert own.hosts == ("127.0.0.1", "192.168.0.1", "fd00::1")


async def test_a_host_that_is_known_to_work_comes_first(anna: Node) -> None:
    ben = anna.others[BEN]
    assert (await ben.channels.ask(ANNA, ASK)).hosts[0] == "192.168.0.1"
    ben.best[ANNA] = "fd00::1"
    assert (await ben.channels.ask(ANNA, ASK)).hosts == ("fd00::1", "192.168.0.1", "127.0.0.1")
    ben.best[ANNA] = "100.64.0.1"  # as the connection shows it: the node itself knows nothing of it
    assert (await ben.channels.ask(ANNA, ASK)).hosts[:2] == ("100.64.0.1", "192.168.0.1")


async def test_only_the_seat_s_own_node_may_dial_as_that_seat(anna: Node) -> None:
    with pytest.raises(Refused, match="is not carl's"):
        await anna.channels.offer(CARL, ASK)
    assert anna.runner.told == []


async def test_a_runner_that_is_being_started_is_waited_for_but_not_for_long(
    autojump_clock: MockClock, anna: Node
) -> None:
    anna.started = trio.Event()
    with pytest.raises(Refused, match="no runner here"):
        await anna.channels.offer(BEN, ASK)
    assert trio.current_time() == LISTEN_WAIT_SECONDS
    async with trio.open_nursery() as nursery:
        nursery.start_soon(anna.channels.offer, BEN, ASK)
        await trio.sleep(LISTEN_WAIT_SECONDS / 2)
        anna.started.set()
    assert isinstance(anna.runner.told[0], ExpectChannel)


async def test_the_last_seat_dials_the_head_once_that_has_a_runner(autojump_clock: MockClock, anna: Node) -> None:
    ben = anna.others[BEN]
    anna.key = SeatKey(INSTANCE, 2, 0)  # not of this epoch yet
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ben.channels.link, ben.key, PLACEMENT, cast("Any", ben.runner))
        await trio.sleep(5)
        assert ben.runner.told == []
        anna.key = SeatKey(INSTANCE, 1, 0)
    (expected,), (dialled,) = anna.runner.told, ben.runner.told
    assert isinstance(expected, ExpectChannel)
    assert isinstance(dialled, DialChannel)
    assert (dialled.role, dialled.to_seat, dialled.offer.token) == ("samples", 0, expected.token)
