"""What an agent and one of its runners say to each other, over the socket pair that the runner inherits.

Length-prefixed msgpack, each message a map with its `kind`. Either side's death closes the pair,
which is the other side's signal: a runner without an agent exits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from meshinfer.base.bounds import at_least, between, finite, sized
from meshinfer.base.wire_ids import WireInstanceId
from meshinfer.topology.card import Epoch
from meshinfer.topology.placement import Placement
from meshinfer.wire.codec import Registry
from meshinfer.wire.messages import ChannelOffer, ChannelRole

# --- agent → runner -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadSeat:
    """First message: what to be."""

    model_path: Annotated[str, sized(1, 4096)]
    instance_id: WireInstanceId
    epoch: Epoch
    placement: Placement
    seat_index: Annotated[int, between(0, 255)]
    bind_host: Annotated[str, sized(1, 64)]
    """Where to listen for channels: loopback for a node that serves only itself, else all interfaces
    (nothing is served without a pinned certificate and a one-time token)."""
    prefill_chunk_tokens: Annotated[int, between(1, 65536)]
    memory_limit_bytes: Annotated[int, at_least(0)]


@dataclass(frozen=True, slots=True)
class ExpectChannel:
    """Somebody holding this certificate's key will dial with this token; it works once, within the deadline."""

    role: ChannelRole
    from_seat: Annotated[int, between(-1, 255)]
    certificate_der: Annotated[bytes, sized(1, 4096)]
    token: Annotated[bytes, sized(16, 64)]
    lapses_in_seconds: Annotated[float, between(0, 600)]


@dataclass(frozen=True, slots=True)
class DialChannel:
    """Open the channel to that seat: activations to the next stage, samples from the last stage to the head."""

    role: ChannelRole
    to_seat: Annotated[int, between(0, 255)]
    offer: ChannelOffer


@dataclass(frozen=True, slots=True)
class Rebind:
    """Go on as this seat of the instance's next epoch, with the layers that are loaded: same layers, same context,
    same concurrency. All sessions and channels of the old epoch end; new channels follow. What can be kept of the
    sessions is kept, in case their origins open them again.
    """

    epoch: Epoch
    placement: Placement
    seat_index: Annotated[int, between(0, 255)]


@dataclass(frozen=True, slots=True)
class OriginGone:
    """Who shows this certificate has vanished: its channel, if there is one, ends with all its sessions."""

    certificate_der: Annotated[bytes, sized(1, 4096)]


@dataclass(frozen=True, slots=True)
class StopRunner:
    """End now: free everything, exit 0."""


AgentMessage = LoadSeat | ExpectChannel | DialChannel | Rebind | OriginGone | StopRunner

# --- runner → agent -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Listening:
    """The runner is up: where its channels listen, and its ephemeral certificate."""

    port: Annotated[int, between(1, 65535)]
    certificate_der: Annotated[bytes, sized(1, 4096)]


@dataclass(frozen=True, slots=True)
class Loading:
    loaded_bytes: Annotated[int, at_least(0)]
    total_bytes: Annotated[int, at_least(0)]
    next_bytes: Annotated[int, at_least(0)] = 0
    """Of the layer that is read next: until then nothing more is said but heartbeats. 0: there is none."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """All layers are resident."""

    active_bytes: Annotated[int, at_least(0)]
    """As the engine counts it."""
    resident_bytes: Annotated[int, at_least(0)]
    """As the kernel counts it (RSS)."""
    seconds: Annotated[float, finite(0)]


@dataclass(frozen=True, slots=True)
class Linked:
    """Every channel that this seat needs is open: it can run steps."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Four times a second, and it means progress: the MLX thread writes `steps`, not the thread that sends this."""

    steps: Annotated[int, at_least(0)]
    busy_seconds: Annotated[float, finite(0)]
    """How long the current step has been running; 0 when idle."""
    sessions: Annotated[int, at_least(0)]
    waiting: Annotated[int, at_least(0)]
    """Sessions in the head's queue."""
    active_bytes: Annotated[int, at_least(0)]
    cache_bytes: Annotated[int, at_least(0)]
    resident_bytes: Annotated[int, at_least(0)]
    step_seconds: Annotated[float, finite(0)]
    """Smoothed decode step of this stage alone."""
    tokens: Annotated[int, at_least(0)]
    """Tokens sampled since start (last stage)."""
    busy_tokens: Annotated[int, at_least(0)] = 0
    """Of the current step, if it reads prompts: as many as it reads, over all its sessions; 0 when it samples or is idle."""
    recomputed_tokens: Annotated[int, at_least(0)] = 0
    """Tokens that this stage computed since start though some stage had computed them before: of sessions that were
    opened again."""
    kept_bytes: Annotated[int, at_least(0)] = 0
    """What it keeps in case a session is opened again: caches of sessions that broke off, outputs of running ones."""
    computing_seconds: Annotated[float, finite(0)] = 0.0
    """The same decode step on the engine's own clock, which leaves out what others on the machine made it wait."""
    prompt_seconds: Annotated[float, finite(0)] = 0.0
    """The longest step so far that read of prompts; before there is one, a rehearsal. 0: there was none."""
    prompt_tokens: Annotated[int, at_least(0)] = 0
    """That it read."""


@dataclass(frozen=True, slots=True)
class ChannelLost:
    """A channel to another seat broke: this instance cannot go on.

    A runner in the middle of a step says so late, perhaps when its agent has told it already to go on as the next epoch's.
    """

    epoch: Epoch
    role: ChannelRole
    seat: Annotated[int, between(-1, 255)]
    reason: Annotated[str, sized(0, 512)]
    unanswered: bool = False
    """It never was open: that seat was dialled, and nothing came back."""


@dataclass(frozen=True, slots=True)
class LinkSample:
    """How fast a large frame from that seat's node came in: so many bytes of its second half. At most one a second."""

    seat: Annotated[int, between(0, 255)]
    byte_count: Annotated[int, at_least(1)]
    seconds: Annotated[float, between(1e-9, 3600)]


@dataclass(frozen=True, slots=True)
class RunnerFailed:
    """It cannot be this seat; the process ends after this."""

    code: Annotated[str, sized(1, 32)]
    what: Annotated[str, sized(0, 2048)]
    expected: Annotated[str, sized(0, 512)] = ""
    do: Annotated[str, sized(0, 512)] = ""


RunnerMessage = Listening | Loading | Loaded | Linked | Heartbeat | ChannelLost | LinkSample | RunnerFailed

AGENT_MESSAGES = Registry(LoadSeat, ExpectChannel, DialChannel, Rebind, OriginGone, StopRunner)
RUNNER_MESSAGES = Registry(Listening, Loading, Loaded, Linked, Heartbeat, ChannelLost, LinkSample, RunnerFailed)
