"""What a plan minimises, as integers that searches can add up: picoseconds of the objective, per stage and hop.

Both objectives in time are sums over stages and hops, and one maximum:

    J = Σ stages (P + n·D) + Σ hops (C_chunk + n·C_step) + n·C_return + k·max(P, transfer)

with P a prefill chunk, D a decode step, n the output tokens, k the chunks after the first.
- `latency`: one typical request alone: D and C of one session, k = chunks of its prompt − 1.
- `throughput`: a full house, all sessions at once: D and C of that batch, k = chunks of all prompts − 1.
- `fit`: the fewest nodes, the shortest way round among those, the fairest cut (`search`, `partition`); J of
  one request only orders what is left.

Integers, so that sums do not depend on their order; a test holds J against `cost.predict` in floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshinfer.base.ids import NodeId
from meshinfer.planning.cost import TOKEN_BYTES, ModelWork, chunks_of, hop_seconds
from meshinfer.planning.workload import Workload
from meshinfer.topology.speed import LinkSpeed


def picoseconds(seconds: float) -> int:
    return round(seconds * 1e12)


@dataclass(frozen=True, slots=True)
class Terms:
    """The numbers of J for one workload."""

    batch: int
    """Sessions of the decode step that counts."""
    steps: int
    """n: output tokens, each of which is a decode step."""
    context: float
    """Mean context of a decode step."""
    chunk_tokens: int
    chunk_context: float
    further_chunks: int
    """k: prefill chunks after the first, each of which adds the bottleneck."""

    @classmethod
    def of(cls, workload: Workload, prefill_chunk_tokens: int) -> Terms:
        prompt, output = workload.typical
        chunks, tokens = chunks_of(prompt, prefill_chunk_tokens)
        crowd = workload.concurrency if workload.objective == "throughput" else 1
        return cls(
            batch=crowd,
            steps=output,
            context=prompt + output / 2,
            chunk_tokens=tokens,
            chunk_context=prompt / 2,
            further_chunks=crowd * chunks - 1,
        )

    def hop(self, link: LinkSpeed, work: ModelWork) -> int:
        """Activations over `link`, from a node that runs `work`."""
        chunk, step = (hop_seconds(link, n * work.activation_bytes_per_token) for n in (self.chunk_tokens, self.batch))
        return picoseconds(chunk) + self.steps * picoseconds(step)

    def back(self, link: LinkSpeed) -> int:
        """Tokens over `link`, from the last stage to the head."""
        return self.steps * picoseconds(hop_seconds(link, self.batch * TOKEN_BYTES))

    def transfer(self, link: LinkSpeed, work: ModelWork) -> int:
        """How long a chunk keeps `link` busy."""
        return picoseconds(self.chunk_tokens * work.activation_bytes_per_token / link.bandwidth_bytes_per_second)


Node = TypeVar("Node", int, NodeId)


def way(sources: Sequence[Node], targets: Sequence[Node], price: Callable[[Node, Node], int]) -> tuple[Node, Node]:
    """The link that counts between two stages.

    All ranks of a tensor group have the activation, so each rank of the next stage gets it from the nearest of them;
    the last to get it counts.
    """
    nearest = [min((price(source, target), source, target) for source in sources) for target in targets]
    _, source, target = max(nearest)
    return source, target
