"""What this node lets others probe: round trips always, bursts on its own budget and only while nothing here is disturbed.

Whoever wants to probe asks, and is offered a channel and an allowance: bytes that are set aside of the budget until the
offer lapses. What was used is known when the channel has closed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from meshinfer.base.ids import NodeId
from meshinfer.mesh.link_plan import is_idle
from meshinfer.mesh.own_card import OwnCard
from meshinfer.mesh.probe_budget import ProbeBudget
from meshinfer.mesh.probe_channels import ProbeChannels
from meshinfer.transport.base import Transport
from meshinfer.transport.probe_channel import BULK_BYTES, LAPSE_SECONDS, PROBE_SECONDS
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import LINK_PROBE, LinkProbe, LinkProbeOffer

log = logging.getLogger(__name__)

RESERVED_SECONDS = LAPSE_SECONDS + PROBE_SECONDS
"""How long an offered allowance can still be used."""
LENT_APART_SECONDS = 1.0
"""Between two allowances: whoever got the first one has begun by then, and `is_serving` tells."""
MAX_HOSTS = 32


class ProbeOffers:
    """Answers those who ask."""

    def __init__(
        self,
        transport: Transport,
        channels: ProbeChannels,
        own_card: OwnCard,
        budget: ProbeBudget,
        *,
        bursting: Callable[[], bool],
    ) -> None:
        """
        Args:
            transport: carries the questions.
            channels: makes the offers.
            own_card: read for whether this node works.
            budget: shared with this node's own probes.
            bursting: whether one of those makes bursts now.
        """
        self._transport, self._channels, self._own_card = transport, channels, own_card
        self._budget, self._bursting = budget, bursting
        self._lent: list[tuple[float, int]] = []
        """Allowances that can still be used: until when, and how much."""
        transport.serve(LINK_PROBE, self._on_probe)

    def settle(self, now: float) -> None:
        """What others used of this node's budget, and what they no longer can."""
        self._budget.settle(0, self._channels.take_served_bytes(), now)
        for _, lent_bytes in (lent for lent in self._lent if lent[0] <= now):
            self._budget.settle(lent_bytes, 0, now)
        self._lent = [lent for lent in self._lent if lent[0] > now]

    async def _on_probe(self, caller: NodeId, payload: bytes) -> bytes:
        ask, now = decode(LinkProbe, payload), trio.current_time()
        bulk_bytes = 0
        if ask.bulk_bytes and self._is_free(now):
            bulk_bytes = self._budget.reserve(min(ask.bulk_bytes, BULK_BYTES), now)
            self._lent.append((now + RESERVED_SECONDS, bulk_bytes))
        addresses = self._transport.addresses()
        hosts = tuple(dict.fromkeys(address.rpartition(":")[0].strip("[]") for address in addresses))
        offer = self._channels.offer(ask.certificate_der, hosts[:MAX_HOSTS], bulk_bytes)
        log.debug("%s probes this node, with up to %d bytes of bursts", caller, bulk_bytes)
        return encode(LinkProbeOffer(offer, bulk_bytes))

    def _is_free(self, now: float) -> bool:
        """Bursts would disturb nobody here, and nobody them."""
        lent_lately = any(until - now > RESERVED_SECONDS - LENT_APART_SECONDS for until, _ in self._lent)
        return (
            not self._bursting() and not self._channels.is_serving and not lent_lately and is_idle(self._own_card.card)
        )
