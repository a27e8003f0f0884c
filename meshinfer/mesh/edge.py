"""What is known here of the way to one neighbour, and what of it is announced. Pure.

One of the two ends decides over which pair of addresses their edge runs. It has tried all of them, each a `Path`, and
takes the best; the other end knows one path, as the decider's reports tell it. Either may decide in the course of
time, so both are kept; one's own choice goes first.

What is announced is steadied: a figure stands until the estimate has left it by a fifth, so that an idle mesh repeats
itself word for word.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, field, replace
from typing import Literal

from meshinfer.mesh.link_estimate import Health, Path, best_path
from meshinfer.mesh.link_plan import candidate_hosts
from meshinfer.topology.link import Link, off_the_wire
from meshinfer.wire.messages import LinkReport

STEADY_SHARE = 0.2
"""Of a figure that is announced."""

News = Literal["none", "drift", "first"]
"""Of what is announced: nothing, figures that were known before, something that was not known."""


@dataclass(frozen=True, slots=True)
class Ends:
    """What the paths of an edge follow from."""

    addresses: tuple[str, ...] = ()
    """The other end's, as its card says."""
    connected_host: str | None = None
    own_addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """As announced; 0: not known."""

    bandwidth_bytes_per_second: float = 0.0
    rtt_seconds: float = 0.0
    """Of a frame, its time on the wire included."""
    message_seconds: float = 0.0
    degraded: bool = False


@dataclass
class Edge:
    """The way to one neighbour."""

    since: float
    ends: Ends = field(default_factory=Ends)
    paths: dict[str, Path] = field(default_factory=dict[str, Path])
    """By the other end's host: those that this end tries. The other end's decisions are in `told`."""
    chosen: str | None = None
    """The path of `paths` that is in use, if this end decides and one works."""
    told: Path = field(default_factory=Path)
    """As the other end reports it."""
    told_host: str | None = None
    """Where it is to be dialled, as it says and its card confirms."""
    told_at: float | None = None
    said: Said = field(default_factory=Said)
    busy: bool = False
    """It is being probed."""
    not_before: float = 0.0
    """When it may be probed again."""
    arrival_told_at: float = float("-inf")
    """When the other end last heard from here how its frames arrive."""
    _health: Health = field(default_factory=Health)

    @property
    def current(self) -> Path:
        return self.paths[self.chosen] if self.chosen else self.told

    @property
    def host(self) -> str | None:
        """Where runners dial the other end's: verified, and both ends agree on it. None: not yet."""
        return self.chosen or self.told_host

    def lies_between(self, ends: Ends) -> None:
        """The paths that there are between them; what is known of those that stay, stays."""
        if ends == self.ends:
            return
        self.ends = ends
        hosts = candidate_hosts(ends.addresses, ends.connected_host, ends.own_addresses)
        self.paths = {host: self.paths.get(host) or Path() for host in hosts}
        if self.chosen not in self.paths:
            self.chosen = None

    def choose(self) -> bool:
        """Take the best path; whether it is another one."""
        best = best_path(self.paths, self.chosen)
        if best == self.chosen:
            return False
        self.chosen, self._health = best, Health()
        return True

    def decided(self, host: str | None, report: LinkReport, now: float) -> None:
        """The other end has decided on a pair of addresses, and says what it measured there.

        `host`: its own of the pair; None if it is nothing that could be dialled.
        """
        if host != self.told_host:
            self.told_host, self.told, self._health = host, Path(), Health()
        self.told_at = now
        self.told.answered(report.rtt_seconds, report.message_seconds, now)
        if report.bandwidth_bytes_per_second:
            self.told.carried(report.bandwidth_bytes_per_second, 0.0, now)

    def follow(self, now: float) -> News:
        """What is announced follows the estimates."""
        path, before = self.current, self.said
        self._health.look(path.rtt.value, path.bandwidth_out.value, now)
        self.said = Said(
            _steady(before.bandwidth_bytes_per_second, path.bandwidth_out.value),
            _steady(before.rtt_seconds, path.rtt.value),
            _steady(before.message_seconds, path.message.value),
            self._health.is_degraded(now),
        )
        if self.said == before:
            return "none"
        is_first = any(new and not old for old, new in zip(astuple(before), astuple(self.said), strict=True))
        return "first" if is_first else "drift"

    def complete(self, link: Link) -> Link:
        """`link` with what is announced of the channel over it."""
        said = self.said
        return replace(
            link,
            bandwidth_bytes_per_second=said.bandwidth_bytes_per_second,
            channel_rtt_seconds=off_the_wire(said.rtt_seconds, said.bandwidth_bytes_per_second),
            message_seconds=said.message_seconds,
            degraded=said.degraded,
        )


def _steady(said: float, value: float) -> float:
    """`said`, unless `value` has left it by more than a fifth."""
    return value if value and abs(value - said) > STEADY_SHARE * said else said
