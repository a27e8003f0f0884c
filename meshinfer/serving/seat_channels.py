"""Channels to runners: an offer for who may dial one of this node's, and what this node's own seats dial.

A runner lets in whom its agent has told it of, by certificate and by a token that works once. So whoever dials has its
own agent ask the other end's for an offer: where to dial, what to pin, what to say first. Each seat dials the next one,
for activations, and the last one dials the head, for samples. What an origin dials is in `serving.origin_links`.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace

import trio

from meshinfer.base.errors import MeshinferError, PeerLost, Refused
from meshinfer.base.ids import NodeId
from meshinfer.serving.held_runner import HeldRunner
from meshinfer.serving.held_seat import SeatKey, dialled_by
from meshinfer.serving.ports import Ports
from meshinfer.serving.runners import Runner
from meshinfer.serving.view import AHEAD
from meshinfer.topology.placement import Placement
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import OPEN_CHANNEL, ChannelOffer, OpenChannel
from meshinfer.wire.runner_control import DialChannel, ExpectChannel

log = logging.getLogger(__name__)

TOKEN_LAPSE_SECONDS = 10.0
"""From a channel's offer to its use: one dial and one TLS handshake, with room for a slow link."""
LISTEN_WAIT_SECONDS = 2.0
"""How long an offer waits for the runner to listen (its imports take 1 to 2 s) before it says 'not yet'."""
MOST_HOSTS = 32
"""Of an offer, as its type has it."""


class SeatChannels:
    """Of this node.

    Args:
        ports: the agent.
        find: this node's runner of that seat, waited for if it is being started; None if there is none.
    """

    def __init__(self, ports: Ports, find: Callable[[SeatKey], Awaitable[HeldRunner | None]]) -> None:
        self._ports = ports
        self._find = find
        ports.transport.serve(OPEN_CHANNEL, self._on_open_channel)

    async def offer(self, peer: NodeId, ask: OpenChannel) -> ChannelOffer:
        """Let `peer` (its seat, or itself as an origin) dial one of our runners.

        Raises:
            Refused: no such seat here, it does not listen yet, or the caller is not who may dial it.
            PeerLost: its runner has just gone.
        """
        held: HeldRunner | None = None
        with trio.move_on_after(LISTEN_WAIT_SECONDS):  # a caller that is sent away comes back up to a second later
            held = await self._find(SeatKey(ask.instance_id, ask.epoch, ask.to_seat))
        if held is None:
            raise Refused(
                f"no runner here for seat {ask.to_seat} of instance {ask.instance_id} epoch {ask.epoch}",
                do="look at the instance again: it may have another epoch",
            )
        if ask.from_seat >= 0:
            seats = held.placement.seats
            if ask.from_seat >= len(seats) or seats[ask.from_seat].node_id != peer:
                raise Refused(f"seat {ask.from_seat} of instance {ask.instance_id} is not {peer}'s")
        runner = held.runner
        with trio.move_on_after(LISTEN_WAIT_SECONDS):
            await runner.heard.wait()
        if runner.listening is None:
            raise Refused("the runner does not listen yet", do="ask again in a moment")
        if ask.role == "origin":
            held.origins.came(peer, ask.certificate_der, trio.current_time())
        token = secrets.token_bytes(32)
        try:
            await runner.send(ExpectChannel(ask.role, ask.from_seat, ask.certificate_der, token, TOKEN_LAPSE_SECONDS))
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerLost("the runner is gone") from error
        own_hosts = [address.rpartition(":")[0].strip("[]") for address in self._ports.transport.addresses()]
        first = "127.0.0.1" if peer == self._ports.node_id else None
        hosts, listening = _hosts(first, own_hosts), runner.listening
        return ChannelOffer(hosts, listening.port, listening.certificate_der, token, held.loads)

    async def ask(self, node: NodeId, ask: OpenChannel) -> ChannelOffer:
        """An offer of one of that node's runners; this node's own without the network.

        Raises:
            MeshinferError: what `offer` does there, or that node does not answer.
        """
        if node == self._ports.node_id:
            return await self.offer(node, ask)
        timeout = self._ports.settings.call_timeout_seconds + LISTEN_WAIT_SECONDS
        offer = decode(ChannelOffer, await self._ports.call(node, OPEN_CHANNEL, encode(ask), timeout))
        known = self._ports.channel_host(node)  # an address that works right now
        return replace(offer, hosts=_hosts(known, offer.hosts))

    async def link(self, key: SeatKey, placement: Placement, runner: Runner) -> None:
        """Open the channel that this seat dials: to the next stage, or from the last one to the head."""
        if key.epoch == AHEAD or len(placement.seats) == 1:  # there is nobody to be linked with, yet or ever
            return
        await runner.heard.wait()
        assert runner.listening is not None
        role, target = dialled_by(placement, key.seat_index)
        ask = OpenChannel(key.instance_id, key.epoch, key.seat_index, target, role, runner.listening.certificate_der)
        peer = placement.seats[target].node_id
        backoff = 0.1
        while True:  # ends with the runner: a load that stalls is failed by the ledger's clock
            try:
                offer = await self.ask(peer, ask)
                await runner.send(DialChannel(role, target, offer))
            except MeshinferError as error:
                log.debug("seat %s: %s channel to seat %d not yet: %s", key, role, target, error)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            else:
                return
            await trio.sleep(backoff)
            backoff = min(1.0, backoff * 2)

    async def _on_open_channel(self, peer: NodeId, payload: bytes) -> bytes:
        return encode(await self.offer(peer, decode(OpenChannel, payload)))


def _hosts(first: str | None, others: Iterable[str]) -> tuple[str, ...]:
    """As many as an offer has room for, in the order in which they are to be dialled."""
    in_order = (first, *others) if first else others
    return tuple(dict.fromkeys(in_order))[:MOST_HOSTS]
