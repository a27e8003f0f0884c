"""The one writer of this node's own card.

Every part of the agent that knows something of this node (seats, models, memory) tells it here; gossip
is woken and says it to the mesh. The incarnation lies in the home directory and rises at each start, so
that whatever this start says outranks what the last one said; versions count within it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from meshinfer.base.errors import NoRoom
from meshinfer.base.files import write_atomically
from meshinfer.mesh.changes import Changes
from meshinfer.topology.card import NodeCard
from meshinfer.wire.codec import encode

log = logging.getLogger(__name__)

MAX_CARD_BYTES = 40 * 1024
"""An announcement has 64 KiB; 40 links of ~250 bytes, 32 suspects and the signature need 15 of them."""


MAX_OUTBIDS = 4
"""A home restored from a backup needs one; one more for each part of a mesh that was apart meanwhile."""


class OwnCard:
    """This node's card as it is now."""

    def __init__(self, card: NodeCard, home: Path) -> None:
        """`card` is as the node describes itself at its start; its counters are set here.

        Blocks on the disk for a moment.
        """
        self._path = home / "incarnation"
        self._card = replace(card, incarnation=self._raise_incarnation(0), version=1)
        self.changes = Changes()
        """Of what others should hear soon: its substance. What drifts or counts travels with the next announcement."""
        self.outbids = 0
        """How often this start had to go above another one."""

    @property
    def card(self) -> NodeCard:
        return self._card

    def update(self, **changes: Any) -> NodeCard:
        """Change the named fields of the card; nothing happens if they have these values already.

        Raises:
            NoRoom: the card would become too large to announce; it stays as it was.
        """
        changed = replace(self._card, **changes)
        if changed == self._card:
            return changed
        size = len(encode(changed))
        if size > MAX_CARD_BYTES:
            raise NoRoom(
                f"this node's card would have {size} bytes",
                expected=f"at most {MAX_CARD_BYTES}",
                do="free seats or remove models here, or use another node",
            )
        is_news = changed.substance != self._card.substance
        self._card = replace(changed, version=self._card.version + 1)
        if is_news:
            self.changes.notify()
        return self._card

    def next_version(self) -> NodeCard:
        """The card under a new number: each announcement has its own, so that one sent later always counts."""
        self._card = replace(self._card, version=self._card.version + 1)
        return self._card

    def outbid(self, incarnation: int) -> None:
        """Someone holds a card of ours from incarnation `incarnation`, above what we remember: go above it.

        But not for ever: a past start of ours can be outbid once and for all, another agent that runs with this
        node's key would answer each time.
        """
        if incarnation >= self._card.incarnation and self.outbids < MAX_OUTBIDS:
            self.outbids += 1
            log.warning("another start of this node had incarnation %d; going above it", incarnation)
            self._card = replace(self._card, incarnation=self._raise_incarnation(incarnation), version=1)
            self.changes.notify()

    def refute(self, incarnation: int) -> bool:
        """Someone suspects us as of `incarnation`: if that is the present one, go above it, which only we can do."""
        if incarnation != self._card.incarnation:
            return False  # refuted already; or no number of ours
        self._card = replace(self._card, incarnation=self._raise_incarnation(incarnation), version=1)
        self.changes.notify()
        return True

    def _raise_incarnation(self, heard: int) -> int:
        """The next incarnation above `heard` and the one on disk, written down before anyone hears of it."""
        try:
            remembered = int(self._path.read_text("ascii"))
        except FileNotFoundError:
            remembered = 0
        except (OSError, ValueError) as error:
            # Losing the count is mended by the first neighbour that remembers us (`outbid`).
            log.warning("cannot read %s (%s); counting from the start", self._path, error)
            remembered = 0
        incarnation = max(remembered, heard, 0) + 1
        try:
            write_atomically(self._path, f"{incarnation}\n".encode())
        except OSError as error:
            log.warning("cannot write %s (%s); the next start may have to be outbid", self._path, error)
        return incarnation
