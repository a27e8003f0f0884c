"""One request from `Ask` to its last token, reported step by step; knows no protocol and no HTTP.

`Generation.run` reads like the request's life: the model's text side → prompt ids → what may be
generated → one session per choice, all at once → pieces of text. It reports into a channel without
a buffer, so a client that reads slowly slows down its own sessions and nothing else. An error is
reported, never raised, so that whoever writes the HTTP answer can put it into the protocol's words.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from meshinfer.api.backend import Backend
from meshinfer.api.dialect import Ask, Ended, Happening, Piece, Usage
from meshinfer.api.errors import BadParameter, ContextExceeded, meshinfer_error_in
from meshinfer.api.metrics import Metrics
from meshinfer.base.errors import DeadlineExceeded, MeshinferError
from meshinfer.base.ids import SessionId, digest_hex
from meshinfer.config import Settings
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.workload import Workload
from meshinfer.serving.requests import Finished, Generated, GenerateRequest
from meshinfer.serving.text import TextModel
from meshinfer.serving.text_answer import TextAnswer
from meshinfer.serving.text_library import TextLibrary
from meshinfer.serving.view import Instance
from meshinfer.wire.records import Sampling

# The backend has the request's deadline too, and knows better what it waited for: it may speak first.
DEADLINE_GRACE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """An `Ask` with everything known that can be known before the first token."""

    model: TextModel
    requests: tuple[GenerateRequest, ...]
    """One per choice."""
    stops: tuple[str, ...]


class Generation:
    """One client's request."""

    def __init__(
        self,
        ask: Ask,
        request_id: str,
        backend: Backend,
        library: TextLibrary,
        settings: Settings,
        metrics: Metrics,
        random_bits: Callable[[int], int] = secrets.randbits,
    ) -> None:
        """`request_id`: 32 hex digits, which is also the first choice's session id."""
        self.ask = ask
        self.session_ids = tuple(session_id_for(request_id, choice) for choice in range(ask.choices))
        self.model: TextModel | None = None
        """Set before the first `Piece` is reported."""
        self._backend, self._library, self._settings, self._metrics = backend, library, settings, metrics
        self._random_bits = random_bits
        self._prompt_tokens = 0
        self._completion_tokens = 0

    @property
    def usage(self) -> Usage:
        """So far."""
        return Usage(self._prompt_tokens, self._completion_tokens)

    async def run(self, report: trio.MemorySendChannel[Happening]) -> Happening:
        """Generate; what is left to be reported then is `complete` or a MeshinferError, and no session is left."""
        deadline = self._settings.request_deadline_seconds
        try:
            with trio.fail_after(deadline + DEADLINE_GRACE_SECONDS):
                prepared = await self._prepare()
                self.model = prepared.model
                async with trio.open_nursery() as nursery:
                    for index, request in enumerate(prepared.requests):
                        nursery.start_soon(self._run_choice, index, request, prepared, report)
        except trio.TooSlowError:
            return DeadlineExceeded(f"no complete answer after {deadline:.0f} s", do="ask for less, or ask again")
        except (MeshinferError, BaseExceptionGroup) as error:
            ours = meshinfer_error_in(error)
            if ours is None:
                raise
            return ours
        return "complete"

    async def _prepare(self) -> Prepared:
        ask = self.ask
        card = await self._backend.model_card(ask.model_id)
        model = await self._library.get(await self._backend.text_directory(ask.model_id))
        # In a thread: a template and a long prompt take tens of milliseconds in which no token would move.
        prompt_ids = await trio.to_thread.run_sync(model.render_chat, ask.messages, abandon_on_cancel=True)
        self._prompt_tokens = len(prompt_ids)
        self._metrics.prompt_tokens(len(prompt_ids))
        reserved = reserved_context(self._backend.instances(), card, self._settings, len(prompt_ids))
        room = reserved - len(prompt_ids)
        if room < 1:
            raise ContextExceeded(
                "messages",
                f"the prompt has {len(prompt_ids)} tokens and the context reserved for {ask.model_id} is {reserved}",
                expected=f"at most {reserved - 1} tokens, so that one can be answered",
                do=f"shorten it, or place the model with a context of up to {card.max_context_tokens} (POST /instance)",
            )
        for token_id, _ in ask.sampling.get("logit_bias", ()):
            if token_id >= card.vocab_size:
                raise BadParameter(
                    "logit_bias", f"'logit_bias' names token {token_id}", expected=f"ids below {card.vocab_size}"
                )
        first = GenerateRequest(
            session_id=self.session_ids[0],
            model_id=ask.model_id,
            prompt_ids=prompt_ids,
            max_new_tokens=min(ask.max_new_tokens or room, room),
            stop_token_ids=model.stop_token_ids,
            sampling=Sampling(seed=self._random_bits(63) if ask.seed is None else ask.seed, **ask.sampling),
            workload=Workload(context_tokens=reserved, concurrency=self._settings.concurrency),
            least_context_tokens=min(reserved, usual_context(card, self._settings)),
            is_open_ended=not ask.max_new_tokens or ask.max_new_tokens >= room,
            deadline_seconds=self._settings.request_deadline_seconds,
        )
        return Prepared(model, tuple(self._choice(first, index) for index in range(ask.choices)), ask.stops)

    def _choice(self, first: GenerateRequest, index: int) -> GenerateRequest:
        """The request of choice `index`: its own session and its own random stream."""
        if index == 0:
            return first
        seed = seed_for(first.sampling.seed, index)
        return replace(first, session_id=self.session_ids[index], sampling=replace(first.sampling, seed=seed))

    async def _run_choice(
        self, index: int, request: GenerateRequest, prepared: Prepared, report: trio.MemorySendChannel[Happening]
    ) -> None:
        answer = TextAnswer(prepared.model, prepared.stops)
        with self._metrics.session() as clock:
            async with self._backend.generate(request) as events:
                while True:
                    event = await events.receive()
                    match event:
                        case Generated():
                            clock.token()
                            self._completion_tokens += 1
                            delta = answer.push(event)
                        case Finished(reason):
                            delta = answer.finish()
                        case _:
                            await report.send(event)
                            continue
                    if delta:
                        await report.send(Piece(index, delta))
                    if isinstance(event, Finished) or answer.stop is not None:
                        reason = "stop" if answer.stop is not None or not isinstance(event, Finished) else event.reason
                        break
            # Out of the session first: its memory is free before the client can ask again.
            await report.send(Ended(index, reason, answer.stop))


def reserved_context(instances: tuple[Instance, ...], card: ModelCard, settings: Settings, prompt_tokens: int) -> int:
    """Tokens that prompt and answer may take together: what is reserved, or what would be reserved.

    Of what is being repaired only where the prompt needs it: less may fit where that does not.
    """
    ours = [found for found in instances if found.placement.model_id == card.model_id]
    usable = [found for found in ours if found.state != "broken"]
    ready = [found for found in usable if found.state == "ready"]
    reserved = max((one.placement.context_tokens for one in ready or usable), default=usual_context(card, settings))
    if prompt_tokens < reserved:
        return reserved
    return max((one.placement.context_tokens for one in ours), default=reserved)


def usual_context(card: ModelCard, settings: Settings) -> int:
    """What a request reserves for a model that is not placed."""
    return min(settings.context_tokens, card.max_context_tokens or settings.context_tokens)


def session_id_for(request_id: str, choice: int) -> SessionId:
    """The session of one choice of one request."""
    return SessionId(request_id if choice == 0 else digest_hex(request_id.encode(), choice.to_bytes(4, "big")))


def seed_for(seed: int, choice: int) -> int:
    """64 bits for one choice: unlike its neighbours', and the same for the same seed."""
    return int(digest_hex(seed.to_bytes(8, "big"), choice.to_bytes(4, "big"), length_bytes=8), 16)
