"""Another agent with this node's key: found, named, and told to a person.

Somebody copied a home directory, or cloned a disk. The two are one node to everyone else: calls go to either,
cards alternate, and each would outbid the other's incarnations for ever. Neither can be right, so no rule decides
between them; both say loudly what is so and what to do, both stop outbidding after a few times (`own_card`), and
both go on serving whoever reaches them.

*Suspicion* is cheap: a card of ours that we did not make, or a record of ours in multicast DNS with an address
that is not ours. It may also be our own past. *Proof* is a handshake: we dial that address, and what answers there
proves our own identity and that it is another process (`KeyCopied`); it learns of us in the same moment. Where
the address cannot be reached from here, being outbid again and again is proof enough.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from meshinfer.mesh.addresses import worth_dialling
from meshinfer.mesh.own_card import OwnCard

log = logging.getLogger(__name__)

ADDRESSES_TRIED = 4
TRY_AGAIN_SECONDS = 60.0
MAX_REMEMBERED = 64
MAX_WARNING = 256


class KeyCopies:
    """What is known of copies of this node's key."""

    def __init__(
        self, own_card: OwnCard, home: Path, own_addresses: Callable[[], Iterable[str]], dial: Callable[[str], None]
    ) -> None:
        """`dial` starts a handshake with whoever is at an address, and returns at once."""
        self._own_card, self._home, self._own_addresses, self._dial = own_card, home, own_addresses, dial
        self._tried: dict[str, float] = {}
        """Addresses that were looked at, and when; oldest first."""
        self.found: tuple[str, ...] = ()
        """Where copies run, proved; or claimed, if that is all we have."""

    def claimed(self, addresses: Iterable[str], now: float) -> None:
        """Someone says that this node is at `addresses`: look who is there, if that is not us."""
        for address in worth_dialling(set(addresses) - {*self._own_addresses()}, ADDRESSES_TRIED):
            if now - self._tried.pop(address, -TRY_AGAIN_SECONDS) >= TRY_AGAIN_SECONDS:
                self._dial(address)
            self._tried[address] = now
            if len(self._tried) > MAX_REMEMBERED:
                del self._tried[next(iter(self._tried))]

    def proved(self, address: str) -> None:
        """What listens at `address` holds this node's key and is another process."""
        self._tell(address)

    def outbid_again(self, addresses: Iterable[str]) -> None:
        """Cards of ours that we did not make keep coming, from one that says it is at `addresses`."""
        if not self.found:
            claimed = worth_dialling(addresses, 1)
            self._tell(claimed[0] if claimed else "an unknown address")

    def _tell(self, address: str) -> None:
        if address in self.found:
            return
        self.found = (*self.found, address)[:ADDRESSES_TRIED]
        message = (
            f"another agent runs with this node's key at {address}: the two are one to everyone else. "
            f"Stop one of them, run `rm {self._home}/identity.key` on its machine, and start it again"
        )
        log.error("%s", message)
        self._own_card.update(warning=message[:MAX_WARNING])
