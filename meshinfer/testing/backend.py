"""An agent without a mesh, for the front door's tests: exact, deterministic, and as unlucky as asked.

The engine behind it is a function: the token at position p depends on the prompt, the seed and p, so
equal requests give equal answers and others do not. `FakeBackend.script` changes what the next
requests meet: a given answer, a failure before or after some tokens, a load that takes until an event,
silence. The tokenizer is `testing.text`'s, real files in a directory; placements, instances and the
refusal of what is too large are made of real values.

It does not fake: memory over time, links that change, prompts taking longer than others.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import trio

from meshinfer.api.backend import Deleted, ModelEntry, RunnerEntry
from meshinfer.base.errors import DeadlineExceeded, MeshinferError, NoRoom, UnknownInstance
from meshinfer.base.ids import InstanceId, ModelId, NodeId, SessionId, digest_hex, instance_id_for
from meshinfer.base.units import GIB, MIB, format_bytes
from meshinfer.models.catalogue import not_in_mesh
from meshinfer.planning.model_card import LayerCard, ModelCard, TensorBytes
from meshinfer.planning.plan import Plan, Preview, Refusal, SeatMemory
from meshinfer.planning.workload import Constraints, Workload
from meshinfer.serving.events import EventStream
from meshinfer.serving.requests import Finished, Generated, GenerateRequest, GenerationFailed, Waiting
from meshinfer.serving.view import Instance
from meshinfer.testing.text import tiny_tokenizer, write_tiny_text
from meshinfer.topology.card import NodeCard, SeatReport
from meshinfer.topology.graph import Topology
from meshinfer.topology.link import Link
from meshinfer.topology.placement import Placement, Seat
from meshinfer.wire.messages import Place

MODEL_ID = ModelId("fake/tiny")
NODE_IDS = (NodeId("12D3KooWFakeA"), NodeId("12D3KooWFakeB"), NodeId("12D3KooWFakeC"))
_LAYERS = 6
_BUSY_SIGN_SECONDS = 0.02
"""How often a request that waits says so."""


@dataclass(frozen=True)
class Script:
    """What a request meets."""

    answer: str | None = None
    """What the model says, then it stops; None: 24 tokens that look random."""
    fail: MeshinferError | None = None
    fail_after_tokens: int = 0
    """Tokens before `fail`; 0: it fails before the first."""
    load: trio.Event | None = None
    """The first token waits for this, with signs of life until then."""
    silent_after_tokens: int | None = None
    """After so many tokens nothing comes any more, not even a sign of life."""
    pace: trio.Event | None = None
    """All tokens after the first wait for this, with signs of life until then."""
    pause: Literal["loading", "repairing"] = "loading"
    """What those signs say."""


class FakeBackend:
    """`api.backend.Backend` over the fake engine. Run it inside trio; `directory` is for the model's files."""

    def __init__(self, directory: Path, *, node_memory_bytes: int = GIB, script: Script | None = None) -> None:
        self.script = script or Script()
        self.running: dict[SessionId, trio.CancelScope] = {}
        """All and only sessions that have not ended."""
        self.requests: list[GenerateRequest] = []
        """Every request that came in, in order."""
        self.unready = ""
        """Why the generation path is not alive; empty: it is."""
        self._idle = trio.Event()
        self._idle.set()
        self._tokenizer = tiny_tokenizer()
        self._card = _model_card(self._tokenizer.get_vocab_size())
        self._text_directory = write_tiny_text(directory / "tiny")
        self._instances: dict[InstanceId, Instance] = {}
        self._topology = _topology(node_memory_bytes)

    # --- what the mesh looks like ---------------------------------------------------------------

    @property
    def node_id(self) -> NodeId:
        return NODE_IDS[0]

    def topology(self) -> Topology:
        return self._topology

    def instances(self) -> tuple[Instance, ...]:
        return tuple(self._instances[key] for key in sorted(self._instances))

    def models(self) -> tuple[ModelEntry, ...]:
        instance = self._instances.get(instance_id_for(MODEL_ID))
        state = instance.state if instance else ""
        return (ModelEntry(MODEL_ID, self._card.digest, 12 * MIB, NODE_IDS[:2], state),)

    def runners(self) -> tuple[RunnerEntry, ...]:
        return ()

    async def model_card(self, model_id: ModelId) -> ModelCard:
        await trio.lowlevel.checkpoint()
        if model_id != MODEL_ID:
            raise not_in_mesh(model_id, (MODEL_ID,))
        return self._card

    async def text_directory(self, model_id: ModelId) -> Path:
        await self.model_card(model_id)
        return self._text_directory

    async def ready(self) -> tuple[bool, str]:
        await trio.lowlevel.checkpoint()
        return not self.unready, self.unready

    # --- placing --------------------------------------------------------------------------------

    async def previews(self, model_id: ModelId, workload: Workload, constraints: Constraints) -> Preview:
        """One candidate for each number of nodes, fewest first."""
        card = await self.model_card(model_id)
        allowed = [
            node
            for node in self._topology.nodes
            if (not constraints.nodes or node.node_id in constraints.nodes) and node.node_id not in constraints.exclude
        ]
        plans: list[Plan] = []
        refusals: list[Refusal] = []
        for count in range(1, len(allowed) + 1):
            placement = _placement(card, tuple(node.node_id for node in allowed[:count]), workload)
            memory = tuple(_seat_memory(card, seat, workload, self._topology) for seat in placement.seats)
            short = [seat for seat in memory if seat.shortfall_bytes]
            nodes = placement.node_ids
            if short:
                lacks = f"{short[0].node_id} lacks {format_bytes(short[0].shortfall_bytes)}"
                refusals.append(Refusal("pipeline", "libp2p", nodes, "memory", lacks, memory))
            else:
                plans.append(Plan(placement, memory, self._topology.digest, 0.001 * (count - 1), "memory", "fits"))
        return Preview(tuple(plans), tuple(refusals))

    async def place(self, place: Place) -> Instance:
        placement = place.placement
        if placement is None:
            preview = await self.previews(place.model_id, place.workload, place.constraints)
            if not preview.plans:
                why = "; ".join(refusal.explanation for refusal in preview.refusals)
                raise NoRoom(f"{place.model_id} has no place: {why}", do="free memory or add a node")
            placement = preview.plans[0].placement
        unknown = [node_id for node_id in placement.node_ids if node_id not in self._topology.by_id]
        if unknown:
            raise NoRoom(f"node {unknown[0]} is not here", do="ask for new previews")
        instance_id = instance_id_for(placement.model_id)
        reports = tuple(
            SeatReport(instance_id, 1, placement.placement_id, index, "ready", 1.0, MIB, MIB)
            for index in range(len(placement.seats))
        )
        self._instances[instance_id] = Instance(instance_id, 1, placement, "ready", 1.0, reports)
        return self._instances[instance_id]

    async def delete(self, instance_id: InstanceId) -> Deleted:
        await trio.lowlevel.checkpoint()
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            raise UnknownInstance(f"no instance {instance_id}", do="GET /instance lists them")
        return Deleted(instance_id, dict.fromkeys(instance.placement.node_ids, MIB), ())

    # --- generating -----------------------------------------------------------------------------

    @asynccontextmanager
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EventStream]:
        self.requests.append(request)
        events, scope = EventStream(0), trio.CancelScope()
        self.running[request.session_id] = scope
        if self._idle.is_set():
            self._idle = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer, request, self.script, events, scope)
                try:
                    yield events
                finally:
                    scope.cancel()
        finally:
            del self.running[request.session_id]
            if not self.running:
                self._idle.set()

    async def cancel(self, session_id: SessionId) -> bool:
        await trio.lowlevel.checkpoint()
        scope = self.running.get(session_id)
        if scope is not None:
            scope.cancel()
        return scope is not None

    async def wait_idle(self) -> None:
        """Until no session runs."""
        await self._idle.wait()

    async def _answer(
        self, request: GenerateRequest, script: Script, events: EventStream, scope: trio.CancelScope
    ) -> None:
        error: MeshinferError | None = GenerationFailed("the request was cancelled")
        with scope:
            try:
                with trio.fail_after(request.deadline_seconds):
                    await self._speak(request, script, events)
                error = None
            except MeshinferError as failure:
                error = failure
            except trio.TooSlowError:
                error = DeadlineExceeded(f"the request took longer than {request.deadline_seconds} s")
        events.end(error)

    async def _speak(self, request: GenerateRequest, script: Script, events: EventStream) -> None:
        if script.load is not None:
            await self._wait_with_signs(script.load, "loading", events)
        if not self._instances:
            await self.place(Place(request.model_id, request.workload, Constraints()))
        tokens = self._tokens(request, script)
        for index, token_id in enumerate(tokens[: request.max_new_tokens]):
            if script.silent_after_tokens == index:
                await trio.sleep_forever()
            if script.fail is not None and script.fail_after_tokens == index:
                raise script.fail
            if index > 0 and script.pace is not None:
                await self._wait_with_signs(script.pace, script.pause, events)
            await events.send(self._generated(request, index, token_id))
        if script.fail is not None:
            raise script.fail
        reason = "stop" if len(tokens) <= request.max_new_tokens else "length"
        await events.send(Finished(reason, NODE_IDS))

    async def _wait_with_signs(
        self, event: trio.Event, phase: Literal["loading", "repairing"], events: EventStream
    ) -> None:
        while not event.is_set():
            await events.send(Waiting(phase, 0.5))
            with trio.move_on_after(_BUSY_SIGN_SECONDS):
                await event.wait()

    def _tokens(self, request: GenerateRequest, script: Script) -> list[int]:
        """The whole answer, its stop token last."""
        if script.answer is not None:
            ids = self._tokenizer.encode(script.answer, add_special_tokens=False).ids
        else:
            seed = request.sampling.seed if request.sampling.temperature > 0 else -1
            # Printable ASCII: ids 0 to 93 of the byte alphabet, and the merged words.
            choices = [*range(94), *range(256, 263)]
            ids = [choices[_dice(request.prompt_ids, seed, position) % len(choices)] for position in range(24)]
        return [*ids, *request.stop_token_ids[:1]]

    def _generated(self, request: GenerateRequest, index: int, token_id: int) -> Generated:
        wanted = request.sampling.top_logprobs
        if wanted < 0:
            return Generated(index, token_id)
        others = tuple((position, -float(position + 1)) for position in range(wanted))
        return Generated(index, token_id, -0.25 * (1 + index % 4), others)


def _dice(prompt_ids: tuple[int, ...], seed: int, position: int) -> int:
    return int(digest_hex(repr((prompt_ids, seed, position)).encode(), length_bytes=4), 16)


def _model_card(vocab_size: int) -> ModelCard:
    weights = TensorBytes(packed_bytes=2 * MIB)
    return ModelCard(
        model_id=MODEL_ID,
        digest=digest_hex(b"fake/tiny"),
        model_type="tiny",
        hidden_size=64,
        vocab_size=vocab_size,
        max_context_tokens=4096,
        layers=(LayerCard(weights, kv_elements_per_token=128),) * _LAYERS,
        cut_points=tuple(range(1, _LAYERS)),
        embedding=weights,
        head=TensorBytes(),
        tied_embeddings=True,
        activation_elements_per_token=64,
        float_bytes_per_element=2,
    )


def _topology(memory_bytes: int) -> Topology:
    cards = [
        NodeCard(
            node_id=node_id,
            incarnation=1,
            version=1,
            name=f"laptop-{index}",
            agent_version="0",
            addresses=(f"192.0.2.{index + 1}:4001",),
            api_url="",
            platform="fake",
            accelerator="cpu",
            cpu_cores=4,
            memory_total_bytes=2 * memory_bytes,
            memory_usable_bytes=memory_bytes,
            memory_promised_bytes=0,
            runner_overhead_bytes=0,
            computes_float32=False,
            load=0.1,
        )
        for index, node_id in enumerate(NODE_IDS)
    ]
    links = [Link(a, b, rtt_seconds=0.002) for a in NODE_IDS for b in NODE_IDS if a != b]
    return Topology.of(cards, links)


def _placement(card: ModelCard, node_ids: tuple[NodeId, ...], workload: Workload) -> Placement:
    cuts = [round(_LAYERS * index / len(node_ids)) for index in range(len(node_ids) + 1)]
    return Placement(
        model_id=card.model_id,
        model_digest=card.digest,
        layer_count=card.layer_count,
        strategy="pipeline",
        channel="libp2p",
        context_tokens=workload.context_tokens,
        concurrency=workload.concurrency,
        seats=tuple(Seat(node, start, end) for node, start, end in zip(node_ids, cuts, cuts[1:], strict=False)),
    )


def _seat_memory(card: ModelCard, seat: Seat, workload: Workload, topology: Topology) -> SeatMemory:
    return SeatMemory(
        node_id=seat.node_id,
        weight_bytes=card.weight_bytes(seat.start, seat.end, False),
        cache_bytes=card.cache_bytes(seat.start, seat.end, workload.context_tokens, workload.concurrency, False),
        activation_bytes=0,
        overhead_bytes=0,
        free_bytes=topology.by_id[seat.node_id].memory_free_bytes,
    )
