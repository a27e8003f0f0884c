"""What is checked before an announcement is believed. Pure, but for the signature check handed in.

In this order, cheapest and most telling first: the envelope's bounds, the author's signature over
the bytes as they came, then the body, then that the body speaks only for its author. So no parser of
cards sees a byte that no member of some key vouched for, and nobody can say anything of another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import NodeId
from meshinfer.mesh.addresses import is_node_id
from meshinfer.topology.card import NodeCard
from meshinfer.topology.link import Link
from meshinfer.transport.base import MAX_GOSSIP_BYTES
from meshinfer.wire.codec import decode, encode
from meshinfer.wire.messages import Announcement, SignedAnnouncement, Suspicion

Verify = Callable[[NodeId, bytes, bytes], bool]
"""(author, payload, signature) → whether the author signed it."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An announcement that its author did make, and its signed form to pass on."""

    card: NodeCard
    links: tuple[Link, ...]
    signed: SignedAnnouncement
    suspects: tuple[tuple[NodeId, int], ...] = ()
    """Whom the author does not reach, each with the incarnation that it knows of it."""

    @property
    def author(self) -> NodeId:
        return self.card.node_id

    @property
    def size_bytes(self) -> int:
        return len(self.signed.payload) + len(self.signed.signature) + len(self.signed.author)

    def says_the_same_as(self, other: Heard) -> bool:
        """Whether nothing differs that a reader of topologies would act on (`NodeCard.substance`): nor ages or suspicions."""
        return _substance(self) == _substance(other)

    def stands_as(self, other: Heard) -> bool:
        """Whether both name the same neighbours and suspects, whatever the figures of links; and the card says the same."""
        return (
            self.card.substance == other.card.substance
            and self.suspects == other.suspects
            and [link.target for link in self.links] == [link.target for link in other.links]
        )


def check(signed: SignedAnnouncement, verify: Verify) -> Heard:
    """The announcement inside `signed`.

    Raises:
        ProtocolError: not signed by its author, not valid, or it speaks for another node.
    """
    author = signed.author
    if not is_node_id(author):
        raise ProtocolError(f"{author[:80]!r} as an author", expected="a node id")
    if not verify(author, signed.payload, signed.signature):
        raise ProtocolError(f"an announcement that {author} did not sign")
    announcement = decode(Announcement, signed.payload, MAX_GOSSIP_BYTES)
    card = announcement.card
    if card.node_id != author:
        raise ProtocolError(f"{author} announced a card of {card.node_id[:80]!r}", expected="its own")
    if any(link.source != author or not is_node_id(link.target) for link in announcement.links):
        raise ProtocolError(f"{author} announced links of other nodes", expected="its own")
    suspects = tuple((suspicion.node, suspicion.incarnation) for suspicion in announcement.suspects)
    return Heard(card, announcement.links, signed, suspects)


def sign(
    card: NodeCard,
    links: tuple[Link, ...],
    sign_bytes: Callable[[bytes], bytes],
    suspects: tuple[tuple[NodeId, int], ...] = (),
) -> Heard:
    """This node's own announcement, signed."""
    payload = encode(Announcement(card, links, tuple(Suspicion(*suspicion) for suspicion in suspects)))
    return Heard(card, links, SignedAnnouncement(card.node_id, payload, sign_bytes(payload)), suspects)


def _substance(heard: Heard) -> tuple[NodeCard, frozenset[tuple[NodeId, float, float]]]:
    links = frozenset((link.target, link.rtt_seconds, link.bandwidth_bytes_per_second) for link in heard.links)
    return heard.card.substance, links
