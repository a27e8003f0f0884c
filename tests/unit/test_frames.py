"""Frames come out as they went in, however the bytes arrive, and nothing else comes out."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.base.errors import ProtocolError
from meshinfer.wire.frames import DTYPE_BYTES, Frame, FrameKind, FrameReader, Tensor, TensorSpec, encode_frame

ALL_KINDS = tuple(FrameKind)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    spec = TensorSpec(draw(st.sampled_from(sorted(DTYPE_BYTES))), tuple(draw(st.lists(st.integers(0, 4), max_size=4))))
    return Tensor(spec, memoryview(draw(st.binary(min_size=spec.size_bytes, max_size=spec.size_bytes))))


@st.composite
def frames(draw: st.DrawFn) -> Frame:
    kind = draw(st.sampled_from(ALL_KINDS))
    return Frame(
        kind,
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**64 - 1)),
        draw(st.binary(max_size=100)),
        tuple(draw(st.lists(tensors(), max_size=3))) if kind == FrameKind.STEP else (),
    )


def feed(reader: FrameReader, data: bytes, at_once: int) -> list[Frame]:
    out: list[Frame] = []
    while data:
        buffer = reader.buffer()
        count = min(len(buffer), len(data), at_once)
        buffer[:count] = data[:count]
        data = data[count:]
        if (frame := reader.advance(count)) is not None:
            out.append(frame)
    return out


@given(st.lists(frames(), max_size=4), st.integers(1, 40))
def test_frames_arrive_whole_whatever_the_pieces(sent: list[Frame], at_once: int):
    data = b"".join(bytes(piece) for frame in sent for piece in encode_frame(frame))
    reader = FrameReader(ALL_KINDS)
    assert feed(reader, data, at_once) == sent
    assert reader.between_frames


@given(st.binary(max_size=300), st.integers(1, 300))
def test_garbage_is_refused_or_waited_for_and_nothing_else(data: bytes, at_once: int):
    reader = FrameReader(ALL_KINDS)
    try:
        assert feed(reader, data, at_once) == [] or data.startswith(b"MF\x01")
    except ProtocolError:
        with pytest.raises(ProtocolError):
            reader.advance(0)


@given(frames(), st.data())
def test_one_changed_byte_gives_a_frame_or_a_refusal(frame: Frame, data: st.DataObject):
    encoded = bytearray(b"".join(bytes(piece) for piece in encode_frame(frame)))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(ProtocolError):
        feed(FrameReader(ALL_KINDS, max_payload_bytes=1 << 16), bytes(encoded), 1 << 20)


def header(**changed: object) -> bytes:
    fields = {"magic": b"MF", "version": 1, "kind": 1, "epoch": 0, "step": 0, "control": 0, "tensors": 0} | changed
    return struct.pack(">2sBBIQIB3x", *fields.values())


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (header(magic=b"GE"), "starts with"),
        (header(version=2), "version 2"),
        (header(kind=9), "kind 9"),
        (header(kind=3), "kind 3"),
        (header(control=2**32 - 1), "control part"),
        (header(tensors=9), "9 tensors"),
        (header(kind=2, tensors=1), "1 tensors"),
        (header(tensors=1) + struct.pack(">BB2x4I", 9, 1, 1, 0, 0, 0), "element type 9"),
        (header(tensors=1) + struct.pack(">BB2x4I", 1, 5, 1, 0, 0, 0), "5 dimensions"),
        (header(tensors=1) + struct.pack(">BB2x4I", 1, 4, *[2**32 - 1] * 4), "bytes of tensors"),
    ],
)
def test_what_a_channel_does_not_take_is_refused_before_memory_is(data: bytes, what: str):
    with pytest.raises(ProtocolError, match=what):
        feed(FrameReader((FrameKind.STEP, FrameKind.ANSWER)), data, 1)
