"""The codec: what goes in comes out, and whatever else comes in is a ProtocolError."""

import inspect
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshinfer.base.errors import ProtocolError
from meshinfer.planning.model_card import ModelCard
from meshinfer.planning.plan import Preview
from meshinfer.testing.cards import node_card
from meshinfer.topology.card import NodeCard
from meshinfer.topology.link import Link
from meshinfer.wire import messages, records, runner_control
from meshinfer.wire.codec import Registry, decode, encode
from meshinfer.wire.messages import Lease, PullView
from meshinfer.wire.records import ORIGIN_RECORDS, RUNNER_RECORDS, CancelSession, OpenSession, Token
from meshinfer.wire.runner_control import AGENT_MESSAGES, RUNNER_MESSAGES

KINDS = sorted(
    {
        kind
        for module in (messages, records, runner_control)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if hasattr(kind, "__dataclass_fields__")
    }
    | {Preview, ModelCard, NodeCard},
    key=lambda kind: kind.__name__,
)


def value_of(kind, info=None):
    """Values of a type as msgspec understands it, within the bounds that its fields carry."""
    node = info or msgspec.inspect.type_info(kind)
    match node:
        case msgspec.inspect.DataclassType(cls=cls, fields=fields):
            return st.builds(cls, **{field.name: value_of(None, field.type) for field in fields})
        case msgspec.inspect.IntType(ge=low, le=high):
            low = -(2**63) if low is None else int(low)
            return st.integers(low, min(2**63 - 1, int(high)) if high is not None else 2**63 - 1)
        case msgspec.inspect.FloatType(gt=above, ge=low, le=high):
            least = low if above is None else above
            return st.floats(least, high, exclude_min=above is not None, allow_nan=False, allow_infinity=least is None)
        case msgspec.inspect.StrType(min_length=low, max_length=high):
            return st.text(st.characters(codec="utf-8"), min_size=low or 0, max_size=_few(low, high))
        case msgspec.inspect.BytesType(min_length=low, max_length=high):
            return st.binary(min_size=low or 0, max_size=_few(low, high))
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType(values=values):
            return st.sampled_from(sorted(values))
        case msgspec.inspect.VarTupleType(item_type=item, min_length=low, max_length=high):
            items = value_of(None, item)
            return st.lists(items, min_size=low or 0, max_size=min(_few(low, high), (low or 0) + 2)).map(tuple)
        case msgspec.inspect.TupleType(item_types=items):
            return st.tuples(*(value_of(None, item) for item in items))
        case msgspec.inspect.UnionType(types=types):
            return st.one_of(*(value_of(None, each) for each in types))
    raise NotImplementedError(node)


def _few(low, high):
    """Enough to exercise the field, and its maximum where that is small."""
    return min(high if high is not None else 1000, (low or 0) + 12)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_what_goes_in_comes_out(kind):
    @settings(max_examples=15)
    @given(value_of(kind))
    def check(value):
        data = encode(value)
        back = decode(kind, data, max_bytes=1 << 24)
        assert back == value
        assert type(back) is kind
        assert encode(back) == data
        assert decode(kind, memoryview(data), max_bytes=1 << 24) == value

    check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_cut_or_changed_bytes_are_a_protocol_error_or_another_valid_value(kind):
    @settings(max_examples=15)
    @given(value_of(kind), st.data())
    def check(value, data):
        whole = encode(value)
        cut = data.draw(st.integers(0, len(whole) - 1))
        with pytest.raises(ProtocolError):
            decode(kind, whole[:cut])
        with pytest.raises(ProtocolError):
            decode(kind, whole + b"\x00")
        changed = bytearray(whole)
        changed[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
        _valid_or_protocol_error(kind, bytes(changed))

    check()


@given(st.sampled_from(KINDS), st.binary(max_size=200))
def test_garbage_is_a_protocol_error(kind, data):
    _valid_or_protocol_error(kind, data)


def _valid_or_protocol_error(kind, data):
    try:
        value = decode(kind, data)
    except ProtocolError:
        return
    assert decode(kind, encode(value)) == value or value != value  # noqa: PLR0124 - a NaN inside


@given(st.sampled_from([ORIGIN_RECORDS, RUNNER_RECORDS, AGENT_MESSAGES, RUNNER_MESSAGES]), st.binary(max_size=200))
def test_garbage_on_a_pipe_is_a_protocol_error(registry, data):
    with pytest.raises(ProtocolError):
        registry.decode(data)


@pytest.mark.parametrize(
    ("registry", "union"),
    [
        (ORIGIN_RECORDS, records.OriginRecord),
        (RUNNER_RECORDS, records.RunnerRecord),
        (AGENT_MESSAGES, runner_control.AgentMessage),
        (RUNNER_MESSAGES, runner_control.RunnerMessage),
    ],
)
def test_every_kind_of_a_pipe_travels_by_its_name(registry, union):
    @settings(max_examples=25)
    @given(st.one_of(*(value_of(kind) for kind in get_args(union))))
    def check(message):
        back = registry.decode(registry.encode(message), max_bytes=1 << 24)
        assert back == message
        assert type(back) is type(message)

    check()


def test_a_kind_of_another_pipe_is_refused_by_name():
    message = RUNNER_RECORDS.encode(Token("a" * 32, 0, 1, ""))
    with pytest.raises(ProtocolError, match="message 'Token'; expected one of OpenSession, CancelSession"):
        ORIGIN_RECORDS.decode(message)


def test_unknown_fields_are_ignored_and_missing_ones_named():
    """A newer peer may say more; it may not say less."""
    known = msgspec.msgpack.encode({"session_id": "s", "since": 3})
    assert decode(CancelSession, known) == CancelSession("s")
    with pytest.raises(ProtocolError, match="session_id"):
        decode(CancelSession, msgspec.msgpack.encode({"session": "s"}))


@pytest.mark.parametrize(
    "body",
    [
        {"known": [["n", 1]]},
        {"known": [["n", 1, 2.5]]},
        {"known": [["n", "1", 2]]},
        {"known": [[b"n", 1, 2]]},
        {"known": None},
        {"known": [["n", 1, 2]] * 2049},
        [],
        None,
        7,
    ],
    ids=repr,
)
def test_wrong_types_and_bounds_are_refused(body):
    with pytest.raises(ProtocolError):
        decode(PullView, msgspec.msgpack.encode(body))


def test_numbers_beyond_their_bounds_are_refused():
    open_session = {
        "session_id": "s", "instance_id": "i", "epoch": 1, "token_ids": [1], "emitted": 0, "max_new_tokens": 1,
        "stop_token_ids": [], "sampling": {"seed": 0},
    }  # fmt: skip
    assert decode(OpenSession, msgspec.msgpack.encode(open_session)).token_ids == (1,)
    for field, wrong in [
        ("token_ids", []), ("token_ids", [-1]), ("token_ids", [2**31]), ("epoch", 2**32), ("max_new_tokens", 0),
        ("sampling", {"seed": -1}), ("sampling", {"seed": 0, "temperature": float("nan")}),
        ("sampling", {"seed": 0, "temperature": float("inf")}), ("sampling", {"seed": 0, "top_p": 1.1}),
    ]:  # fmt: skip
        with pytest.raises(ProtocolError):
            decode(OpenSession, msgspec.msgpack.encode({**open_session, field: wrong}))


@pytest.mark.parametrize("open_bracket", [b"\x91", b"\x81\xa1k", b"\xc7\x01\x05"])
def test_deep_nesting_and_length_bombs_are_refused(open_bracket):
    for kind in (Lease, NodeCard):
        with pytest.raises(ProtocolError):
            decode(kind, open_bracket * 100_000)
        # An array and a string that claim 2³²−1 items.
        for bomb in (b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"):
            with pytest.raises(ProtocolError):
                decode(kind, bomb)


def test_size_is_checked_before_anything_is_parsed():
    data = encode(PullView(()))
    assert decode(PullView, data, max_bytes=len(data)) == PullView(())
    with pytest.raises(ProtocolError, match="expected at most"):
        decode(PullView, data, max_bytes=len(data) - 1)
    with pytest.raises(ProtocolError, match="expected at most"):
        Registry(PullView).decode(b"\x00" * 11, max_bytes=10)


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -1.0, 1e300])
def test_a_number_that_no_page_could_show_is_refused(number):
    """JSON has no infinity: one card with it would take /topology from everybody."""
    card = msgspec.msgpack.decode(encode(node_card("ada")))
    with pytest.raises(ProtocolError, match="load"):
        decode(NodeCard, msgspec.msgpack.encode({**card, "load": number}))
    link = {"source": "a", "target": "b", "rtt_seconds": 0.1, "bandwidth_bytes_per_second": number}
    with pytest.raises(ProtocolError, match="bandwidth"):
        decode(Link, msgspec.msgpack.encode(link))
