"""What py-libp2p 0.8.1 lacks to be left running: each cure beside what happens without it.

All of it is set on instances, from outside; nothing of the library is changed for anyone else. The
cures hold on to private names, which the next minor version may rename, so `check_names` looks for
each of them at start and refuses to go on without: an agent with half its armour is worse than one
that does not start. The attack list in tests/mesh/test_attacks.py shows each cure at work.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any
from weakref import WeakKeyDictionary

import trio
from libp2p.abc import INetStream
from libp2p.host.basic_host import BasicHost, _IdentifyNotifee  # pyright: ignore[reportPrivateUsage]
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify_push.identify_push import ID_PUSH as IDENTIFY_PUSH
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import Pubsub
from libp2p.stream_muxer.yamux.yamux import DEFAULT_WINDOW_SIZE, YamuxStream

from meshinfer.base.errors import MeshinferError

log = logging.getLogger(__name__)

PIN = "0.8.1"
REMEMBERED_MESSAGES = 64
"""Whole ones, to tell two of one number apart: some seconds of gossip of a mesh of a hundred."""
STREAMS_PER_PEER = 64
"""Streams that a peer may have open towards us. A member needs three: gossip, calls, a ping now and then."""

# Names of the library that this package calls, wraps or sets, though no document promises them.
_PUBSUB_TASKS = ("push_msg", "_replay_recent_messages", "_handle_new_peer_with_retry")
_ROUTER_TASKS = ("on_peer_subscribed", "flush_pending_messages", "handle_rpc")
_ROUTER_NAMES = (
    *_ROUTER_TASKS,
    "equivocation_detection",
    "scorer",
    "_check_back_off",
    "_check_graft_flood_protection",
)
_SWARM_NAMES = (
    "add_conn",
    "auto_connector",
    "upgrader",
    "connections",
    "notifees",
    "remove_notifee",
    "set_stream_handler",
)
_HOST_NAMES = ("_swarm_stream_handler", "multiselect_client", "remove_stream_handler", "get_addrs")
_UPGRADER_NAMES = ("upgrade_security", "upgrade_connection", "security_multistream")
_PUBSUB_NAMES = (
    *_PUBSUB_TASKS,
    "_handle_new_peer",
    "_handle_dead_peer",
    "counter",
    "write_msg",
    "_forget_all_subscriptions",
    "_peer_is_connected",
    "_is_subscribed_to_msg",
    "_is_msg_seen",
)


def check_names(host: BasicHost, pubsub: Pubsub, router: GossipSub) -> None:
    """Looks for every unpromised name that we lean on.

    Raises:
        MeshinferError: one is missing; it names the version that has them all.
    """
    swarm = host.get_network()
    upgrader = getattr(swarm, "upgrader", None)
    wanted: tuple[tuple[object, tuple[str, ...]], ...] = (
        (host, _HOST_NAMES),
        (swarm, _SWARM_NAMES),
        (upgrader, _UPGRADER_NAMES),
        (getattr(upgrader, "security_multistream", None), ("secure_inbound", "secure_outbound")),
        (getattr(swarm, "auto_connector", None), ("maybe_connect",)),
        (pubsub, _PUBSUB_NAMES),
        (router, _ROUTER_NAMES),
        (YamuxStream, ("_auto_tune_and_send_window_update",)),
    )
    for owner, names in wanted:
        for name in names:
            if not hasattr(owner, name):
                raise MeshinferError(
                    f"libp2p {metadata.version('libp2p')} has no {type(owner).__name__}.{name}, which our protection needs",
                    expected=f"libp2p {PIN}",
                    do=f"run `pip install libp2p=={PIN}`",
                )


def harden_host(host: BasicHost, swarm: Swarm, may_speak: Callable[[object], bool]) -> None:
    """No error in a stream of one peer reaches anyone else, and nobody has streams without end.

    Without it, a handler's exception, or the name of a protocol that is not UTF-8, ends the whole
    node, and an end of stream that a handler lets out leaves a connection that looks alive and is not.

    `may_speak` says of a connection, as the muxer knows it, whether its peer has proved its membership.
    """
    inner = host._swarm_stream_handler  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    streams: Counter[bytes] = Counter()

    async def handle(stream: INetStream) -> None:
        peer = stream.muxed_conn.peer_id.to_bytes()
        if not may_speak(stream.muxed_conn) or streams[peer] >= STREAMS_PER_PEER:
            await reset(stream)
            return
        streams[peer] += 1
        acknowledge_seldom(stream)
        try:
            await inner(stream)
        except* (StreamError, EOFError) as ended:  # as streams do, with their peer or its connection
            log.debug("a stream of %s ended: %r", stream.muxed_conn.peer_id, ended.exceptions[0])
            await reset(stream)
        except* Exception:  # whatever it is, it concerns one stream of one peer
            log.debug("a stream of %s failed", stream.muxed_conn.peer_id, exc_info=True)
            await reset(stream)
        finally:
            streams[peer] -= 1
            if not streams[peer]:
                del streams[peer]

    swarm.set_stream_handler(handle)
    # It listens nowhere, `connections` does; and it would make an address of its own id to say so, with each message.
    host.get_addrs = list


def acknowledge_seldom(stream: INetStream) -> None:
    """The library tells the sender after each read how much it may send again, in an encrypted message of its own,
    and twice as much as was read. Here it does so when half of the window has been read, as Yamux is meant to: a
    sender always has the other half. That was a third of all messages between two idle nodes.
    """
    muxed_stream = getattr(stream, "muxed_stream", None)
    if not isinstance(muxed_stream, YamuxStream):
        return
    acknowledge = muxed_stream._auto_tune_and_send_window_update  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    unacknowledged = 0

    async def seldom(*, bytes_read: int = 0) -> None:
        nonlocal unacknowledged
        unacknowledged += bytes_read
        if unacknowledged >= DEFAULT_WINDOW_SIZE // 2:
            count, unacknowledged = unacknowledged, 0
            await acknowledge(bytes_read=count)

    muxed_stream._auto_tune_and_send_window_update = seldom  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def remove_auto_connector(swarm: Swarm) -> None:
    """Whom to dial is for membership to say. The library would try addresses that peers put into their gossip."""

    async def connect_nobody() -> None:
        await trio.lowlevel.checkpoint()

    swarm.auto_connector.maybe_connect = connect_nobody


def remove_identify(host: BasicHost, swarm: Swarm) -> None:
    """Takes out the identify protocol: peers tell each other in their cards what they are, and each protocol that is
    not there need not be defended. It also costs two streams per connection.
    """
    for notifee in [notifee for notifee in swarm.notifees if isinstance(notifee, _IdentifyNotifee)]:
        swarm.remove_notifee(notifee)
    for protocol in (IDENTIFY, IDENTIFY_PUSH):
        host.remove_stream_handler(protocol)


def harden_pubsub(pubsub: Pubsub, router: GossipSub) -> None:
    """Gossip goes on whatever one peer sends, across restarts, and after a stream of its own broke."""
    # The library counts messages from the second of its start, so that after a restart within some minutes ours
    # would pass for repetitions (0 of 40 delivered, measured).
    pubsub.counter = time.time_ns()
    # One message with a key or an author that cannot be parsed would end the service, and the node with it.
    for name in _PUBSUB_TASKS:
        setattr(pubsub, name, _contained(getattr(pubsub, name), name))
    for name in _ROUTER_TASKS:
        setattr(router, name, _contained(getattr(router, name), name))
    _open_until_it_works(pubsub)
    _write_one_at_a_time(pubsub)
    _remember_subscriptions(pubsub)
    _pass_over_the_seen(pubsub)
    _take_in_whoever_asks(router)
    # The library keeps up to 1000 messages whole, each with the buffer that it was parsed in: an idle agent among three
    # grew by 14 MiB an hour (measured).
    router.equivocation_detection = _Latest(REMEMBERED_MESSAGES)


def _take_in_whoever_asks(router: GossipSub) -> None:
    """Scores, back-off and flood protection keep strangers from crowding a node's neighbours in gossip. Members are no strangers.

    With scores the library asks further neighbours in at every heartbeat and sends the lowest away, the same ones at
    every node; who was sent away and asks again is refused for a minute, and then refuses for as long the one that
    did. Among eight nodes one or two had no neighbour left, for ever, and the others went on asking and sending away
    (measured). Without, all have two to four within a second, and then nobody asks in or sends away any more. And all of
    it goes by the wall clock: one that is set back an hour would refuse everybody meanwhile.
    """

    def must_wait(peer: ID, topic: str) -> bool:
        del peer, topic
        return False

    def may_ask(peer_id: ID, topic: str) -> bool:
        del peer_id, topic
        return True

    router.scorer = None
    router._check_back_off = must_wait  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    router._check_graft_flood_protection = may_ask  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


class _Latest(dict[bytes, rpc_pb2.Message]):
    """The last so many that were put in."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: bytes, message: rpc_pb2.Message) -> None:
        if len(self) >= self._most:
            del self[next(iter(self))]
        super().__setitem__(key, message)


def _open_until_it_works(pubsub: Pubsub) -> None:
    """The library opens a gossip stream on any connection to its peer. If that one breaks just then, it gives up, though
    another may live: nothing would go that way any more, and of two nodes that dial each other after a stall one
    connection always ends (13 of 20 were left so, measured). It does try again after errors of one kind, as long as the
    peer is connected; so all are of that kind.
    """
    open_stream = pubsub._handle_new_peer  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    opening: dict[ID, trio.Lock] = {}

    async def open_or_try_again(peer_id: ID) -> None:
        # One at a time: of two streams to one peer the library forgets the first, with the task that writes to it.
        lock = opening.setdefault(peer_id, trio.Lock())
        try:
            async with lock:
                await open_stream(peer_id)
        except Exception as error:
            raise SwarmException(f"no gossip stream to {peer_id}: {error!r}") from error
        finally:
            if not lock.locked():
                opening.pop(peer_id, None)
        if peer_id in pubsub.peers and not pubsub._peer_is_connected(peer_id):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            pubsub._handle_dead_peer(peer_id)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    pubsub._handle_new_peer = open_or_try_again  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _write_one_at_a_time(pubsub: Pubsub) -> None:
    """The library replays recent messages in one task while another writes new ones to the same stream; above 64 KiB
    their frames mix, and the peer resets the stream as garbage.

    It also puts a signed list of the node's addresses into each, which is empty here (cards say where a node is), and
    which each copy's reader would check: one signature of the two that an announcement costs, four times among five.
    """
    write = pubsub.write_msg
    locks: WeakKeyDictionary[INetStream, trio.Lock] = WeakKeyDictionary()

    async def write_alone(stream: INetStream, rpc_msg: rpc_pb2.RPC) -> bool:
        rpc_msg.ClearField("senderRecord")
        async with locks.setdefault(stream, trio.Lock()):
            return await write(stream, rpc_msg)

    pubsub.write_msg = write_alone


def _remember_subscriptions(pubsub: Pubsub) -> None:
    """When a gossip stream breaks and the connection does not, the library opens another, but forgets what the peer
    had subscribed to, and a peer says that once per stream of its own: nothing would go that way any more. Here
    every member subscribes to the one topic for as long as it is connected, so only the end of that counts.
    """
    forget = pubsub._forget_all_subscriptions  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def forget_the_gone(peer_id: ID) -> None:
        if not pubsub._peer_is_connected(peer_id):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
            forget(peer_id)

    pubsub._forget_all_subscriptions = forget_the_gone  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _pass_over_the_seen(pubsub: Pubsub) -> None:
    """In a full mesh a message comes from each neighbour. The library starts a task for each copy, looking for its parent
    among all tasks, to find that it had the message: 0.2 ms where a look at once takes 0.01.
    """
    is_for_us = pubsub._is_subscribed_to_msg  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    def is_new_for_us(msg: rpc_pb2.Message) -> bool:
        # Seen is only what was checked, signature and all: nobody makes a message pass for seen that is not.
        return is_for_us(msg) and not pubsub._is_msg_seen(msg)  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]

    pubsub._is_subscribed_to_msg = is_new_for_us  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]


def _contained(task: Callable[..., Awaitable[Any]], name: str) -> Callable[..., Awaitable[None]]:
    async def contained(*arguments: Any, **named: Any) -> None:
        try:
            await task(*arguments, **named)
        except Exception:  # it concerns one message of one peer
            log.debug("gossip: %s failed", name, exc_info=True)

    return contained


async def reset(stream: INetStream) -> None:
    """Gives up a stream, within a second, whatever happens around it."""
    with trio.move_on_after(1, shield=True):
        try:
            await stream.reset()
        except Exception:  # it is being given up
            log.debug("a stream could not be reset", exc_info=True)
