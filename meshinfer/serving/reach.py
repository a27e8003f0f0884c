"""Who can be asked something now, and an end to waiting for one who has fallen silent.

A stopped machine takes calls and dials, and answers none. Each has a deadline of its own, of seconds, since a slow
answer is one; that the node is silent, the mesh knows sooner. That a node answers and its runners do not, only who dials
them knows.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from meshinfer.base.errors import MeshinferError, PeerLost
from meshinfer.base.ids import NodeId
from meshinfer.base.looking import until
from meshinfer.serving.ports import Ports

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often a node that works on an answer is looked at."""

T = TypeVar("T")


def within_reach(ports: Ports) -> set[NodeId]:
    """Members that answer, and this node among those whom they answer."""
    return ports.topology().by_id.keys() - ports.doubtful() - ports.out_of_reach()


def dialled_in_vain(ports: Ports, node: NodeId) -> None:
    """A runner of `node` was dialled from here, and nothing came back: if its agent does answer, the way is blocked."""
    if node in within_reach(ports) - {ports.node_id}:
        log.warning(
            "%s answers, but a runner there that was dialled does not: "
            "a firewall there or here has to let through what this program sends, on any port",
            ports.called(node),
        )
        ports.blocked_ways.unanswered(node, trio.current_time())


async def while_within_reach(ports: Ports, node: NodeId, ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` gets from `node`; PeerLost as soon as that one is silent."""
    called = ports.called(node)  # now: of who is lost the mesh knows no name any more
    answer: list[T] = []
    failure: MeshinferError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_silent, ports, node, nursery.cancel_scope)
        try:
            answer.append(await ask())
        except MeshinferError as error:  # would come out wrapped in a group
            failure = error
        # What is here may be an open channel: a cancel from outside must not lose it on the last step.
        nursery.cancel_scope.shield = True
        nursery.cancel_scope.cancel()
    if answer:
        return answer[0]
    raise failure or PeerLost(f"node {called} does not answer any more")


async def _until_silent(ports: Ports, node: NodeId, asking: trio.CancelScope) -> None:
    await until(lambda: node not in within_reach(ports), LOOK_SECONDS)
    asking.cancel()
