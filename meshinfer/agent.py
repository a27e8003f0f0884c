"""The agent: one process per node. This file is the list of what runs.

    home and key ─► transport (libp2p) ─► mesh (who is here) ─► serving (seats, placing, sessions) ─► HTTP

It never loads MLX and never touches an activation: runners, processes of their own, do that.
"""

from __future__ import annotations

import logging
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import trio

import meshinfer
from meshinfer.api.app import Address, listen, make_app, serve
from meshinfer.api.guard import is_loopback
from meshinfer.api.serving_backend import ServingBackend
from meshinfer.base.beats import begin_beats, sleep_to_beat
from meshinfer.base.errors import NoRoom
from meshinfer.base.ids import NodeId
from meshinfer.config import Settings
from meshinfer.mesh.mesh import Mesh, MeshSettings
from meshinfer.mesh.own_card import OwnCard
from meshinfer.models.renewal import keep_renewed
from meshinfer.models.store import ModelStore
from meshinfer.models.text_cache import TextCache
from meshinfer.serving.battery import until_low
from meshinfer.serving.machine import MachineFacts, measure_machine
from meshinfer.serving.model_cards import ModelCards
from meshinfer.serving.model_files import ModelFiles
from meshinfer.serving.others_load import LOOK_SECONDS, OthersLoad
from meshinfer.serving.ports import OriginChannel, Ports
from meshinfer.serving.runners import RunnerProcess
from meshinfer.serving.service import Serving
from meshinfer.serving.speed_probe import SpeedProbe, node_probe
from meshinfer.topology.card import HeldModel, NodeCard, SeatReport
from meshinfer.topology.placement import Placement
from meshinfer.transport.addresses import dialable_hosts
from meshinfer.transport.certificates import make_certificate
from meshinfer.transport.home_lock import note_api, one_agent
from meshinfer.transport.libp2p.transport import Libp2pSettings, Libp2pTransport
from meshinfer.transport.mesh_key import load_or_make, remember
from meshinfer.transport.origin import open_origin_channel
from meshinfer.transport.probe_channel import ProbeDoor
from meshinfer.wire.messages import ChannelOffer

DIAL_SECONDS = 3.0
"""For one runner's channel: a TCP connection and a TLS handshake on the slowest sensible link."""
log = logging.getLogger(__name__)

MODELS_ON_CARD = 64
"""The bound of `NodeCard.models`; a card with more would be refused by everyone."""
LOOK_AROUND_SECONDS = 2.0
"""How often this node looks at its own store and load. Models pulled by the command line show after this."""
LOAD_STEP = 0.1
"""Of all cores: a change that a planner could care about."""
LEAVE_SECONDS = 45.0
"""For this node's seats to be loaded elsewhere and its own answers to end. A second Ctrl-C does not wait for it."""
GOODBYE_SECONDS = 3.0
"""To say it: one message to each neighbour, none of them waited for. Three seconds are a machine that swaps."""


@dataclass(frozen=True, slots=True)
class Started:
    """What a person wants to know once the agent is up."""

    node_id: NodeId
    name: str
    api_url: str
    addresses: tuple[str, ...]
    """`host:port` for `--peer` on other laptops."""
    mesh_id: str
    join_code: str | None
    """None: the mesh is open."""
    key_source: Literal["made", "home", "file", "environment", "open"]
    """made: this start made the mesh, so the code is news."""
    memory_usable_bytes: int
    accelerator: str
    models: tuple[str, ...]


async def run_agent(settings: Settings, on_step: Callable[[str], None], on_started: Callable[[Started], None]) -> None:
    """Run this node until cancelled; then leave politely, within a minute, and end every runner.

    Leaving is not cancelled by what ends it: who cannot wait ends the process. `on_step` hears what the start is at,
    which takes seconds.

    Raises:
        BadInput: the home is in use, a port is in use, a key or identity file is damaged.
        MeshinferError: the engine cannot be loaded here.
    """
    name = settings.name or socket.gethostname().partition(".")[0]
    begin_beats()
    with one_agent(settings.home), listen(settings) as listener:
        membership = await trio.to_thread.run_sync(
            partial(load_or_make, settings.home, key_file=settings.mesh_key_file, open_mesh=settings.open_mesh)
        )
        on_step("measuring this machine")
        machine = await measure_machine(settings.home, settings.memory_limit_bytes, settings.memory_reserve)
        store = ModelStore(settings.home / "models")
        transport = Libp2pTransport(
            Libp2pSettings(
                home=settings.home,
                mesh_key=membership.key,
                listen_host=settings.listen_host,
                listen_port=settings.listen_port,
                include_loopback=settings.loopback,
            )
        )
        own_card = OwnCard(_first_card(transport.node_id, name, settings, machine, store), settings.home)
        mesh_settings = MeshSettings(
            settings.home, membership.key.mesh_id, settings.peers, settings.discovery, settings.probe_bytes_per_hour
        )
        probes = ProbeDoor(settings.channel_host)
        mesh = Mesh(transport, own_card, mesh_settings, random.Random(), probes=probes)  # noqa: S311 - spreads retries
        serving, backend, speed_probe = _make_serving(settings, transport, mesh, own_card, store)

        def show(api: Address) -> None:
            on_started(
                Started(
                    node_id=transport.node_id,
                    name=name,
                    api_url=api.url,
                    addresses=transport.addresses(),
                    mesh_id=membership.key.mesh_id,
                    join_code=membership.code.reveal() if membership.code else None,
                    key_source=membership.source,
                    memory_usable_bytes=machine.memory_usable_bytes,
                    accelerator=machine.accelerator,
                    models=tuple(model.model_id for model in store.held()),
                )
            )

        async with trio.open_nursery() as asking:
            asked = trio.Event()
            asking.start_soon(_tell_of_cancelling, asked, name="asked to leave")
            async with trio.open_nursery() as nursery:
                on_step("opening the network")
                await nursery.start(transport.run, name="transport")
                await nursery.start(mesh.run, name="mesh")
                nursery.start_soon(serving.run, name="serving")
                nursery.start_soon(_look_around, own_card, store, name="look around")
                nursery.start_soon(keep_renewed, store, name="older models")
                nursery.start_soon(speed_probe.run, name="speed probe")
                nursery.start_soon(
                    _ask_to_leave_on_low_battery, settings.leave_at_battery_percent, asked, name="battery"
                )
                async with trio.open_nursery() as front:
                    close = trio.Event()
                    door = partial(serve, make_app(backend, settings), listener, stop=close)
                    api = await front.start(door, name="http")
                    # "Every interface" is nothing to call: one of its addresses is.
                    for host in dialable_hosts((api.host,), include_loopback=False)[:1]:
                        api = replace(api, host=host)
                    own_card.update(api_url="" if is_loopback(api.host) else api.url)
                    note_api(settings.home, api.url)
                    await trio.to_thread.run_sync(remember, settings.home, membership)
                    show(api)
                    # Until here cancelling ends it at once. From here on it is a wish: seats are handed over,
                    # answers end and the goodbye is said by services that still run.
                    nursery.cancel_scope.shield = True
                    await asked.wait()
                    await _leave(serving, mesh, name)
                    close.set()  # the last answers' last bytes are still on their way
                nursery.cancel_scope.cancel()
            asking.cancel_scope.cancel()


async def _leave(serving: Serving, mesh: Mesh, name: str) -> None:
    try:
        with trio.move_on_after(LEAVE_SECONDS):
            await serving.leave(f"node {name} left")
    finally:  # without it the others wait for this node until they take it for dead
        with trio.move_on_after(GOODBYE_SECONDS):
            await mesh.leave()


async def _ask_to_leave_on_low_battery(percent: float, asked: trio.Event) -> None:
    if percent > 0:
        left = await until_low(percent)
        log.warning("the battery is at %.0f %% and not charged: leaving the mesh", left.percent)
        asked.set()


async def _tell_of_cancelling(asked: trio.Event) -> None:
    """Cancelling this task is how the agent is asked to leave."""
    try:
        await trio.sleep_forever()
    finally:
        asked.set()


def _make_serving(
    settings: Settings, transport: Libp2pTransport, mesh: Mesh, own_card: OwnCard, store: ModelStore
) -> tuple[Serving, ServingBackend, SpeedProbe]:
    cards = ModelCards(transport, mesh.call, mesh.topology, store.info, settings.call_timeout_seconds)
    files = ModelFiles(store, TextCache(settings.home / "text"), cards, transport, mesh.call)
    certificate = make_certificate()

    def announce(
        seats: tuple[SeatReport, ...],
        placements: tuple[Placement, ...],
        promised_bytes: int,
        blocked: tuple[NodeId, ...],
    ) -> None:
        try:
            own_card.update(seats=seats, placements=placements, memory_promised_bytes=promised_bytes, blocked=blocked)
        except NoRoom as error:  # its seats run all the same, but the mesh sees them as they were
            log.error("%s", error)  # noqa: TRY400 - a sentence for the operator, no traceback

    async def open_channel(offer: ChannelOffer) -> OriginChannel:
        return await open_origin_channel(offer, certificate, timeout_seconds=DIAL_SECONDS)

    ports = Ports(
        settings=settings,
        transport=transport,
        call=mesh.call,
        topology=mesh.topology,
        doubtful=mesh.doubtful,
        out_of_reach=mesh.out_of_reach,
        is_waking=mesh.is_waking,
        blame=mesh.blame,
        watch=mesh.changes,
        announce=announce,
        drain=partial(own_card.update, draining=True),
        model_cards=cards,
        model_path=files.path,
        start_runner=RunnerProcess.start,
        open_channel=open_channel,
        origin_certificate_der=certificate.der,
        best_host=mesh.best_host,
        want_links=mesh.want_links,
        frame_arrived=mesh.frame_arrived,
    )
    serving = Serving.of(ports)
    speed_probe = node_probe(ports, serving.seats, store, own_card.update)
    return serving, ServingBackend(serving, files.text_directory), speed_probe


def _first_card(node_id: NodeId, name: str, settings: Settings, machine: MachineFacts, store: ModelStore) -> NodeCard:
    return NodeCard(
        node_id=node_id,
        incarnation=0,
        version=0,
        name=name[:128],
        agent_version=meshinfer.__version__,
        addresses=(),
        api_url="",
        platform=machine.platform,
        accelerator=machine.accelerator,
        cpu_cores=machine.cpu_cores,
        memory_total_bytes=machine.memory_total_bytes,
        memory_usable_bytes=machine.memory_usable_bytes,
        memory_promised_bytes=0,
        runner_overhead_bytes=settings.runner_overhead_bytes,
        computes_float32=machine.computes_float32,
        load=0.0,
        models=_shown(store.held()),
    )


def _shown(held: tuple[HeldModel, ...]) -> tuple[HeldModel, ...]:
    """What a card has room for."""
    if len(held) > MODELS_ON_CARD:
        left_out = ", ".join(model.model_id for model in held[MODELS_ON_CARD:])
        log.warning("a card names %d models; the mesh does not see %s here", MODELS_ON_CARD, left_out)
    return held[:MODELS_ON_CARD]


async def _look_around(own_card: OwnCard, store: ModelStore) -> None:
    """Keep the card true about what changes outside of this process: models on disk, load."""
    known = own_card.card.models
    others, looked_at = OthersLoad(), trio.current_time()
    while True:
        await sleep_to_beat(LOOK_AROUND_SECONDS)
        held = await trio.to_thread.run_sync(store.held)
        if held != known:
            known = held
            own_card.update(models=_shown(held))
        if trio.current_time() >= looked_at + LOOK_SECONDS:
            looked_at = trio.current_time()
            load = await trio.to_thread.run_sync(others.look)
            if abs(load - own_card.card.load) > LOAD_STEP:
                own_card.update(load=load)
