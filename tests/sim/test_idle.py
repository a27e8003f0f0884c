"""Whole agents that have served and are asked nothing hold no more after a while than before."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import trio
from whole_agents import three_of

from meshinfer.testing.cluster import Cluster, SimNode

SETTLED_SECONDS = 120.0
"""What was used is put away: links are closed after a minute, warm layers after twenty seconds."""
IDLE_SECONDS = 600.0


def parts(thing: object) -> Iterator[tuple[str, object]]:
    """What an object of ours or a container holds, by name."""
    if isinstance(thing, dict):
        yield from (("", value) for value in thing.values())
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        yield from (("", value) for value in thing)
    elif type(thing).__module__.startswith("meshinfer."):
        slots = {name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())}
        names = slots | getattr(thing, "__dict__", {}).keys()
        yield from ((f"{type(thing).__name__}.{name}", getattr(thing, name, None)) for name in sorted(names))


def sizes(*roots: object) -> Counter[str]:
    """How many entries the containers have in all that can be got at from `roots`, by the attribute that holds them."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = [("", root) for root in roots]
    while waiting:
        where, thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, dict | list | set | frozenset | deque):
            found[where] += len(thing)
        waiting += [(name or where, part) for name, part in parts(thing)]
    return found


def tasks(node: SimNode) -> Counter[str]:
    found: Counter[str] = Counter()
    waiting = [node.nursery] if node.nursery else []
    while waiting:
        for task in waiting.pop().child_tasks:
            found[f"task {task.name}"] += 1
            waiting += task.child_nurseries
    return found


def held(cluster: Cluster) -> dict[str, Counter[str]]:
    return {node.name: tasks(node) + sizes(node.serving, node.mesh) for node in cluster.nodes}


async def test_whole_agents_at_rest_are_flat(autojump_clock) -> None:
    async with three_of(4) as cluster:
        for seed, node in enumerate(cluster.nodes):
            await cluster.ask(node, cluster.request((1, 2), 5, seed))
        await trio.sleep(SETTLED_SECONDS)
        before = held(cluster)
        await trio.sleep(IDLE_SECONDS)
        after = held(cluster)
    assert sum(had["SeatLedger._seats"] for had in before.values()) == 3, "it looks where things are"
    for name, had in before.items():
        assert {what: (had[what], count) for what, count in after[name].items() if count > had[what]} == {}
