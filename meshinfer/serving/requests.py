"""The one internal request behind every protocol adapter, and the events that answer it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshinfer.base.errors import MeshinferError
from meshinfer.base.ids import ModelId, NodeId, SessionId
from meshinfer.planning.workload import Workload
from meshinfer.wire.records import Sampling

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One continuation of one prompt. Text (templates, stop strings, tools) has been dealt with above."""

    session_id: SessionId
    model_id: ModelId
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]
    sampling: Sampling
    workload: Workload
    """What to reserve if the model has to be placed for this request."""
    deadline_seconds: float = 600.0
    """The request as a whole; on it, the protocol's own error."""
    least_context_tokens: int = 0
    """Once the answer has begun, and so much as `workload` says fits nowhere any more: with this it can go on. 0: with no less."""
    is_open_ended: bool = False
    """`max_new_tokens` is what there was room for, and no wish: with less room the answer ends sooner, as with a small context."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing to show yet, but alive: the model is being placed or loaded, or the prompt is long."""

    phase: Literal["planning", "placing", "loading", "queued", "prefill", "repairing"]
    done: float
    """Share of the phase, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One token."""

    index: int
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that went well."""

    reason: FinishReason
    node_ids: tuple[NodeId, ...]
    """Who ran it, in pipeline order."""


GenerateEvent = Waiting | Generated | Finished


class GenerationFailed(MeshinferError):
    """An answer that had begun cannot go on."""

    code = "generation_failed"
