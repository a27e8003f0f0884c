"""Frames: what runners send over a channel, small enough in overhead to stand in a token's path.

    ┌────────────────────── header, 24 bytes, big-endian ──────────────────────┐
    │ "MF" │ version │ kind │ epoch u32 │ step u64 │ control u32 │ tensors │ 000 │
    ├──────────────────────────────────────────────────────────────────────────┤
    │ one descriptor of 20 bytes for each tensor: dtype, dimensions, 4 sizes    │
    │ control: msgpack (`wire.steps` or `wire.records`)                         │
    │ the tensors' bytes, one after another, as they lie in memory              │
    └──────────────────────────────────────────────────────────────────────────┘

The tensors' sizes follow from their descriptors, so there is no second length that could disagree.

`FrameReader` is a pure, total decoder that *lends buffers*: the driver asks where the next bytes go,
lets the kernel write there (`recv_into`), and says how many came. So tensors are received into place
without a copy, and a test can feed it one byte at a time. Every size is checked before memory is taken
for it; after an error nothing more is read: there is no way to find the next frame, the channel ends.

Little-endian elements are assumed on both ends: every machine that MLX runs on is.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from meshinfer.base.errors import ProtocolError

FRAME_VERSION = 1
MAGIC = b"MF"
MAX_TENSORS = 8
"""Token ids and the carried arrays: one for nearly all models, two for rwkv7."""
MAX_DIMENSIONS = 4
"""Batch × length × hidden, and one for models that carry several streams."""
MAX_PAYLOAD_BYTES = 1 << 30
"""8 prompts × 512 tokens × 16384 wide × 4 bytes are a quarter of it; a channel that knows its model asks for less."""

_HEADER = struct.Struct(">2sBBIQIB3x")
_DESCRIPTOR = struct.Struct(">BB2x4I")


class FrameKind(IntEnum):
    """What a frame is; a channel takes only the kinds of its role."""

    STEP = 1
    """Stage → next stage: a `steps.StepControl`, token ids, carried arrays."""
    ANSWER = 2
    """Last stage → head: a `steps.StepAnswer`."""
    RECORD = 3
    """Origin ↔ head or last stage: a record of `wire.records`."""


MAX_CONTROL_BYTES = {
    FrameKind.STEP: 4 << 20,  # 256 new sessions with 1024 logit biases each are 3.5 MB
    FrameKind.ANSWER: 1 << 20,  # 4096 rows of a number, an id and a word
    FrameKind.RECORD: 24 << 20,  # records.MAX_RECORD_BYTES: a prompt of 2²² tokens
}

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4}
"""The element types that travel, by MLX's names; the wire's code is the place in this list, from 1."""
_DTYPES = tuple(DTYPE_BYTES)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one array is: element type and sizes."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array as bytes: `data` is flat and lives as long as somebody holds it."""

    spec: TensorSpec
    data: memoryview


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame. Its form is valid; what its control and tensors mean is for the receiver to check."""

    kind: FrameKind
    epoch: int
    step: int
    """Counts the steps of one instance's head; an answer carries its step's; 0 for records."""
    control: bytes
    tensors: tuple[Tensor, ...] = ()


def encode_frame(frame: Frame) -> list[bytes | memoryview]:
    """`frame` as pieces to be sent one after another; the tensors' bytes are not copied."""
    assert len(frame.tensors) <= MAX_TENSORS
    assert len(frame.control) <= MAX_CONTROL_BYTES[frame.kind]
    pieces = [
        _HEADER.pack(MAGIC, FRAME_VERSION, frame.kind, frame.epoch, frame.step, len(frame.control), len(frame.tensors))
    ]
    for tensor in frame.tensors:
        shape = tensor.spec.shape
        assert len(shape) <= MAX_DIMENSIONS
        assert tensor.data.nbytes == tensor.spec.size_bytes
        padded = (*shape, *(0,) * (MAX_DIMENSIONS - len(shape)))
        pieces.append(_DESCRIPTOR.pack(_DTYPES.index(tensor.spec.dtype) + 1, len(shape), *padded))
    return [b"".join((*pieces, frame.control)), *(tensor.data for tensor in frame.tensors if tensor.data.nbytes)]


class FrameReader:
    """Bytes in, frames out: call `buffer`, fill some of it, call `advance`; again and again.

    Args:
        kinds: what this channel may carry.
        max_payload_bytes: of all tensors of one frame together.
        make_room: memory for a tensor of so many bytes, which its frame then owns.
    """

    def __init__(
        self,
        kinds: Sequence[FrameKind],
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        make_room: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
    ) -> None:
        self._kinds = tuple(kinds)
        self._max_payload_bytes = max_payload_bytes
        self._make_room = make_room
        self._failed = False
        self._expect_header()

    @property
    def between_frames(self) -> bool:
        """No frame has begun: an end of the stream here is a clean one."""
        return self._header is None and self._filled == 0

    def buffer(self) -> memoryview:
        """Where the next bytes go; never empty, may be much larger than what is at hand."""
        return self._targets[0][self._filled :]

    def advance(self, count: int) -> Frame | None:
        """`count` bytes were written to the last `buffer`: the frame that they complete, if they do.

        Raises:
            ProtocolError: this is not a frame, or not one that this channel takes. The reader is of no use then.
        """
        if self._failed:
            raise ProtocolError("bytes after a frame that was refused", expected="a closed channel")
        self._filled += count
        assert self._filled <= len(self._targets[0])
        if self._filled < len(self._targets[0]):
            return None
        try:
            return self._part_complete()
        except ProtocolError:
            self._failed = True
            raise

    def _part_complete(self) -> Frame | None:
        done = self._targets.pop(0)
        self._filled = 0
        if self._header is None:
            self._header = self._parse_header(done)
            if self._details_bytes(self._header):
                self._targets = [memoryview(bytearray(self._details_bytes(self._header)))]
                return None
            done = memoryview(b"")
        if self._specs is None:
            self._specs = self._parse_descriptors(done)
            self._control = bytes(done[_DESCRIPTOR.size * len(self._specs) :])
            self._arrays = [self._make_room(spec.size_bytes) for spec in self._specs]
            self._targets = [array for array in self._arrays if array.nbytes]
        if self._targets:
            return None
        header = self._header
        tensors = tuple(Tensor(spec, data) for spec, data in zip(self._specs, self._arrays, strict=True))
        frame = Frame(header.kind, header.epoch, header.step, self._control, tensors)
        self._expect_header()
        return frame

    def _expect_header(self) -> None:
        self._header: _Header | None = None
        self._specs: tuple[TensorSpec, ...] | None = None
        self._control = b""
        self._arrays: list[memoryview] = []
        self._targets = [memoryview(bytearray(_HEADER.size))]
        self._filled = 0

    def _parse_header(self, data: memoryview) -> _Header:
        magic, version, kind, epoch, step, control_bytes, tensor_count = _HEADER.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(f"a frame that starts with {bytes(magic)!r}", expected=repr(MAGIC))
        if version != FRAME_VERSION:
            raise ProtocolError(
                f"a frame of version {version}",
                expected=f"version {FRAME_VERSION}",
                do="run the same version of meshinfer on all nodes",
            )
        if kind not in self._kinds:
            raise ProtocolError(f"a frame of kind {kind}", expected=f"one of {[k.name for k in self._kinds]}")
        if control_bytes > MAX_CONTROL_BYTES[FrameKind(kind)]:
            raise ProtocolError(
                f"a control part of {control_bytes} bytes", expected=f"at most {MAX_CONTROL_BYTES[FrameKind(kind)]}"
            )
        if tensor_count > (MAX_TENSORS if kind == FrameKind.STEP else 0):
            raise ProtocolError(f"{tensor_count} tensors in a frame of kind {FrameKind(kind).name}")
        return _Header(FrameKind(kind), epoch, step, control_bytes, tensor_count)

    @staticmethod
    def _details_bytes(header: _Header) -> int:
        return _DESCRIPTOR.size * header.tensor_count + header.control_bytes

    def _parse_descriptors(self, data: memoryview) -> tuple[TensorSpec, ...]:
        assert self._header is not None
        specs = tuple(
            _parse_descriptor(data[_DESCRIPTOR.size * index : _DESCRIPTOR.size * (index + 1)])
            for index in range(self._header.tensor_count)
        )
        payload_bytes = sum(spec.size_bytes for spec in specs)
        if payload_bytes > self._max_payload_bytes:
            raise ProtocolError(f"{payload_bytes} bytes of tensors", expected=f"at most {self._max_payload_bytes}")
        return specs


@dataclass(frozen=True, slots=True)
class _Header:
    kind: FrameKind
    epoch: int
    step: int
    control_bytes: int
    tensor_count: int


def _parse_descriptor(data: memoryview) -> TensorSpec:
    code, dimensions, *sizes = _DESCRIPTOR.unpack(data)
    if not 1 <= code <= len(_DTYPES):
        raise ProtocolError(f"a tensor of element type {code}", expected=f"1 to {len(_DTYPES)}: {', '.join(_DTYPES)}")
    if dimensions > MAX_DIMENSIONS:
        raise ProtocolError(f"a tensor of {dimensions} dimensions", expected=f"at most {MAX_DIMENSIONS}")
    return TensorSpec(_DTYPES[code - 1], tuple(sizes[:dimensions]))
