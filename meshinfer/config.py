"""Settings of an agent: frozen, each with its unit, its default and what raising it costs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

PROBE_BYTES_PER_HOUR = 512 * 1024**2


def default_home() -> Path:
    """Where identity, mesh key, address book and models live: MESHINFER_HOME, or the platform's data directory."""
    named = os.environ.get("MESHINFER_HOME")
    return Path(named) if named else platformdirs.user_data_path("meshinfer", appauthor=False)


@dataclass(frozen=True)
class Settings:
    """One agent's dials."""

    home: Path = field(default_factory=default_home)
    """One agent per home; a second one is refused."""

    name: str = ""
    """What people call this node; the host name if empty."""

    # --- who may come in ---
    open_mesh: bool = False
    """Anyone on the network may join: for isolated networks only."""
    mesh_key_file: Path | None = None
    """A file with a join code, for prepared deployments; else MESHINFER_JOIN_CODE, else what `join` remembered."""

    # --- network ---
    listen_host: str = "0.0.0.0"  # noqa: S104 - every interface; nothing but the mesh handshake is served to strangers
    listen_port: int = 0
    """libp2p. 0: any free port; discovery tells the others."""
    api_host: str = "127.0.0.1"
    """Loopback unless said otherwise; another address wants an API key."""
    api_port: int = 52415
    api_key: str = ""
    api_without_key: bool = False
    """Serve a non-loopback address without a key: for trusted networks, by name only."""
    api_body_limit_bytes: int = 32 * 1024**2
    """Of one HTTP request. A long conversation has a few MB; raising it lets more memory be taken before any check."""
    api_first_token_wait_seconds: float = 8.0
    """How long a streamed answer's HTTP status waits for the first token, so that a failure can still be a status.
    Raising it risks clients and proxies that give up on silence (the strictest known: 10 s)."""
    api_heartbeat_seconds: float = 8.0
    """Silence in a stream after which a sign of life is sent."""
    api_heartbeat_as_delta: bool = False
    """Signs of life as empty deltas, for clients that stumble over comments in event streams."""
    request_deadline_seconds: float = 600.0
    """A request as a whole, placing and loading included."""
    peers: tuple[str, ...] = ()
    """`host:port` of other agents, for networks that filter multicast. One is enough."""
    discovery: bool = True
    """Announce and listen on the LAN."""
    loopback: bool = False
    """Announce loopback addresses too: several agents on one machine."""

    probe_bytes_per_hour: int = PROBE_BYTES_PER_HOUR
    """What measuring links may send and receive in any hour, at most: 1.2 Mbit/s on average; round trips alone take
    1.4 MB per link. A pair's first probe takes 1 to 2 MB at 100 Mbit/s, 15 to 20 at 1 Gbit/s, so sixteen laptops on a
    gigabit switch need 300 MB to know each other. Raising it finds a link that changed while idle sooner (bursts are
    repeated every ten minutes as far as it reaches) and takes that from other traffic; 0 leaves bandwidth to be
    learnt from real frames only."""

    # --- machine ---
    memory_limit_bytes: int = 0
    """What runners may use in all. 0: what is available, less the reserve."""
    memory_reserve: float = 0.1
    """Share of usable memory that is never promised. Raising it wastes memory; lowering it risks swapping."""
    runner_overhead_bytes: int = 192 * 1024**2
    """What a runner takes before its first layer: 172 MB RSS measured with MLX and mlx-lm imported on Linux."""
    leave_at_battery_percent: float = 5.0
    """Leave the mesh when no more is left and nothing charges it: a minute or two of work. 0: stay to the end."""

    # --- placing ---
    context_tokens: int = 4096
    """KV headroom per session when a request places its model. Doubling it doubles the cache bytes."""
    concurrency: int = 4
    """Sessions with a full context at once."""
    prefill_chunk_tokens: int = 512
    """Longer chunks use the machine better and hold up the others' next token longer."""
    lease_seconds: float = 7.0
    """A promise that is not committed lapses after this: two calls' deadlines (the other seats' leases, and the commit)
    and one second. Raising it holds memory longer for a planner that lives and fell silent."""
    call_timeout_seconds: float = 3.0
    """A control call to a live node; longer delays the next candidate."""
    spare_runner: bool = True
    """Keep one runner process started and idle while there is memory for it (170 MB): a seat then loads 2 s sooner,
    which is most of the pause when a repair has to load layers elsewhere."""
    load_stall_seconds: float = 60.0
    """A runner that loads nothing for this long is given up."""
    request_queue_limit: int = 64
    """Requests in this node at once, as their origin; more get 429."""

    @property
    def channel_host(self) -> str:
        """Where channels of runners and probes listen: on loopback for a node that serves only itself, else on every
        interface (nothing is served there without a pinned certificate and a one-time token).
        """
        return self.listen_host if self.listen_host.startswith("127.") else "0.0.0.0"  # noqa: S104
