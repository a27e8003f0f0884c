"""What a placement is for, and what the operator allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from meshinfer.base.bounds import between, sized
from meshinfer.base.wire_ids import WireNodeId

Objective = Literal["latency", "throughput", "fit"]


@dataclass(frozen=True, slots=True)
class Workload:
    """What to reserve and to optimise for."""

    context_tokens: Annotated[int, between(1, 2**31 - 1)] = 4096
    """KV headroom per session. Raising it costs cache bytes in every layer."""
    concurrency: Annotated[int, between(1, 4096)] = 4
    """Sessions with a full context at once; more wait in the queue."""
    prompt_tokens: Annotated[int, between(1, 2**31 - 1)] = 256
    output_tokens: Annotated[int, between(1, 2**31 - 1)] = 256
    objective: Objective = "latency"

    @property
    def typical(self) -> tuple[int, int]:
        """(prompt, output) tokens of a typical request, within the context."""
        prompt = max(1, min(self.prompt_tokens, self.context_tokens - 1))
        return prompt, max(1, min(self.output_tokens, self.context_tokens - prompt))


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the operator allows; empty means anything."""

    nodes: Annotated[tuple[WireNodeId, ...], sized(0, 256)] = ()
    """Only these."""
    exclude: Annotated[tuple[WireNodeId, ...], sized(0, 256)] = ()
    layers: Annotated[tuple[tuple[WireNodeId, Annotated[int, between(1, 1024)]], ...], sized(0, 256)] = ()
    """These nodes take part, with so many layers each."""
    memory_limits: Annotated[tuple[tuple[WireNodeId, Annotated[int, between(0, 2**63 - 1)]], ...], sized(0, 256)] = ()
    """Bytes that runners may use in all on a node, where that is less than its card says."""
