"""Which arrays a lazy result would read if it were evaluated.

MLX can print the graph behind unevaluated arrays, with names for arrays of our choice. Following its
edges backwards tells, without reading a weight, exactly which parameters a stage needs, whatever the
model does with them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence

import mlx.core as mx

_EDGE = re.compile(r'^"?(\w+)"? -> "?(\w+)"?$', re.MULTILINE)


def arrays_read_by(outputs: Sequence[mx.array], named: Mapping[str, mx.array]) -> frozenset[str]:
    """Names of those arrays in `named` that evaluating `outputs` would read."""
    # Names of our own, since those in `named` may hold anything; outputs get a node each, even if they are named too.
    names = {f"named{index}": name for index, name in enumerate(named)}
    ends = {f"output{index}": mx.stop_gradient(output) for index, output in enumerate(outputs)}
    text = io.StringIO()
    mx.export_to_dot(text, *ends.values(), **ends, **dict(zip(names, named.values(), strict=True)))
    inputs: dict[str, list[str]] = {}
    for source, target in _EDGE.findall(text.getvalue()):
        inputs.setdefault(target, []).append(source)
    reached: set[str] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += inputs.get(node, ())
    return frozenset(names[node] for node in reached & names.keys())
