"""How often a node says again what all know already. Pure.

An announcement that tells nothing new does three things: it repairs one that was lost, it carries what only drifts (load,
counters, figures of links), and it keeps this node's words from lapsing in others' views. For the last of them every
four seconds will do, and in a mesh in which nothing happens there is nothing else to do. So:

    unsettled   somewhere a node or a link came or went, a seat changed, somebody is suspected     2 s
    drifting    what this node said last is not quite so any more                                  2 s
    quiet                                                                                          4 s

What is unsettled is so for a while, at every node that hears of it: who was just doubted, refuted or lost is decided upon
by what others say in the seconds after (`view.Bounds.doubt_seconds`, `membership.Membership.suspects`).
"""

from __future__ import annotations

from dataclasses import replace

from meshinfer.topology.card import NodeCard

PERIOD_SECONDS = 2.0
"""Between announcements while anything is unsettled, in a full mesh. Halving it doubles gossip then; views converge in two
periods."""
QUIET_PERIOD_SECONDS = 4.0
"""… while nothing is. Doubling it saves an idle agent among five 0.2 % of a core; but who stops for ten seconds and wakes
must not find that all others' words have lapsed meanwhile (`view.Bounds.lifetime_seconds`)."""
SETTLE_SECONDS = 12.0
"""Since the last news. A verdict waits for 7 s for what others say after it, and a refuted suspicion is announced for 10."""


class Pace:
    """Of one node. `now` is seconds on any monotonic clock; `rarity` is that of `neighbours`."""

    def __init__(self, said: NodeCard, now: float) -> None:
        """It was announced as `said` just now."""
        self._said, self._said_at = said, now
        self._stirred_at = now
        self._drifted = False
        """Figures of its links have moved since."""

    def stir(self, now: float) -> None:
        """Something happened, here or elsewhere, after which all should hear from all soon."""
        self._stirred_at = now

    def drifted(self) -> None:
        """Figures of this node's links have moved."""
        self._drifted = True

    def told(self, said: NodeCard, now: float) -> None:
        """This node has announced itself."""
        self._said, self._said_at, self._drifted = said, now, False

    def due(self, card: NodeCard, rarity: float, now: float) -> float:
        """When to announce `card`, as it is now, if no news makes that sooner."""
        is_unsettled = now < self._stirred_at + SETTLE_SECONDS * rarity
        is_as_said = not self._drifted and replace(card, version=self._said.version) == self._said
        return self._said_at + rarity * (QUIET_PERIOD_SECONDS if is_as_said and not is_unsettled else PERIOD_SECONDS)
