"""What lazy arrays depend on, before anything is evaluated.

MLX can print the graph behind unevaluated arrays, with names for arrays of our choice. Following its
edges backwards tells, without reading a weight, which parameters a stage needs and which values of one
layer reach another, whatever the model does in between.
"""

from __future__ import annotations

import io
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Generic, TypeVar

import mlx.core as mx

Name = TypeVar("Name", bound=Hashable)

_EDGE = re.compile(r'^"?(\w+)"? -> "?(\w+)"?$', re.MULTILINE)


class LazyGraph(Generic[Name]):
    """The graph behind some unevaluated arrays.

    Args:
        named: arrays that may be found among what others depend on.
        roots: arrays whose dependencies will be asked for.
    """

    def __init__(self, named: Mapping[Name, mx.array], roots: Sequence[mx.array]) -> None:
        # Node names of our own. A root gets a node to itself, so that it may be one of the named arrays too.
        self._names = {f"named{index}": name for index, name in enumerate(named)}
        arrays = {f"root{index}": mx.stop_gradient(root) for index, root in enumerate(roots)}
        arrays |= dict(zip(self._names, named.values(), strict=True))
        text = io.StringIO()
        mx.export_to_dot(text, *arrays.values(), **arrays)
        self._inputs: dict[str, list[str]] = {}
        for source, target in _EDGE.findall(text.getvalue()):
            self._inputs.setdefault(target, []).append(source)

    def read_by(self, roots: Sequence[int]) -> frozenset[Name]:
        """The named arrays that evaluating these roots (by their index) would read."""
        reached: set[str] = set()
        waiting = [f"root{index}" for index in roots]
        while waiting:
            node = waiting.pop()
            if node not in reached:
                reached.add(node)
                waiting += self._inputs.get(node, ())
        return frozenset(self._names[node] for node in reached & self._names.keys())
