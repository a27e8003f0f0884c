"""Nothing that another node may send is unbounded: no text, list or float of any field of any message.

Integers have a lower bound; the format itself gives them 64 bits.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Annotated, Any

import msgspec
import pytest
from msgspec.inspect import type_info

from meshinfer.api.sse import to_json
from meshinfer.base.errors import ProtocolError
from meshinfer.base.ids import NodeId, SessionId
from meshinfer.transport.probe_channel import Receipt, SendMe
from meshinfer.wire import messages, records, runner_control, steps
from meshinfer.wire.codec import decode, encode

MODULES = [messages, records, steps, runner_control]


def kinds_of(module: ModuleType) -> list[type]:
    own = (kind for _, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__)
    return [kind for kind in own if dataclasses.is_dataclass(kind)]


def unbounded(info: Any, path: str) -> Iterator[str]:
    """Paths of what has no upper bound, and of floats that may be infinite (NaN passes no bound)."""
    inner: dict[str, Any] = {}
    match info:
        case msgspec.inspect.StrType(max_length=None) | msgspec.inspect.BytesType(max_length=None):
            yield path
        case msgspec.inspect.IntType(le=None, lt=None):
            if info.ge is None:
                yield path
        case msgspec.inspect.FloatType(ge=None) | msgspec.inspect.FloatType(le=None):
            yield path
        case msgspec.inspect.VarTupleType():
            if info.max_length is None:
                yield path
            inner = {"[]": info.item_type}
        case msgspec.inspect.TupleType():
            inner = {f"[{index}]": each for index, each in enumerate(info.item_types)}
        case msgspec.inspect.UnionType():
            inner = {f"<{index}>": each for index, each in enumerate(info.types)}
        case msgspec.inspect.DataclassType():
            inner = {f".{field.name}": field.type for field in info.fields}
        case _:
            pass
    for name, each in inner.items():
        yield from unbounded(each, path + name)


@pytest.mark.parametrize(
    "kind",
    [*(kind for module in MODULES for kind in kinds_of(module)), SendMe, Receipt],
    ids=lambda kind: kind.__name__,
)
def test_every_field_is_bounded(kind: type) -> None:
    assert list(unbounded(type_info(kind), kind.__name__)) == []


def test_the_walk_finds_what_is_unbounded() -> None:
    @dataclasses.dataclass
    class Loose:
        text: str
        numbers: Annotated[tuple[float, ...], msgspec.Meta(max_length=3)]
        pairs: tuple[tuple[Annotated[str, msgspec.Meta(max_length=3)], int | None], ...]
        bound: Annotated[int, msgspec.Meta(ge=0)]

    found = ["Loose.text", "Loose.numbers[]", "Loose.pairs", "Loose.pairs[][1]<0>"]
    assert sorted(unbounded(type_info(Loose), "Loose")) == sorted(found)


@pytest.mark.parametrize("node_id", ["", "1" * 129])
def test_a_node_id_of_no_possible_length_is_refused(node_id: str) -> None:
    assert decode(messages.PingForMe, encode(messages.PingForMe(NodeId("1" * 128)))).target == "1" * 128
    with pytest.raises(ProtocolError, match="target"):
        decode(messages.PingForMe, encode(messages.PingForMe(NodeId(node_id))))


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("of", ["token", "others"])
def test_a_logprob_that_json_cannot_say_is_refused(logprob: float, of: str) -> None:
    token = records.Token(SessionId("a"), 0, 1, "", records.LOWEST_LOGPROB, ((1, -0.5),))
    assert records.RUNNER_RECORDS.decode(records.RUNNER_RECORDS.encode(token)) == token
    wrong = {"logprob": logprob} if of == "token" else {"top_logprobs": ((1, logprob),)}
    with pytest.raises(ProtocolError, match="logprob"):
        records.RUNNER_RECORDS.decode(records.RUNNER_RECORDS.encode(dataclasses.replace(token, **wrong)))


def test_answers_hold_no_number_that_is_not_json() -> None:
    assert to_json({"a": [math.nan, math.inf, -math.inf, 1.5]}) == b'{"a":[null,null,null,1.5]}'
