"""What tests of the data plane need: a tiny model on disk, real runner processes, and an agent that drives them.

The agent here is a fake one: it speaks `wire.runner_control` over socket pairs and makes the offers that
two agents would exchange. Everything else is real: processes, TLS, MLX.
"""

from __future__ import annotations

import itertools
import json
import queue
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshinfer.base.ids import InstanceId, ModelId, NodeId, SessionId
from meshinfer.topology.placement import Placement, Seat
from meshinfer.transport.certificates import Certificate, make_certificate
from meshinfer.transport.tls import Listener, SecureSocket, dial
from meshinfer.wire.frames import Frame, FrameKind, FrameReader, encode_frame
from meshinfer.wire.messages import ChannelOffer, ChannelRole
from meshinfer.wire.records import (
    MAX_RECORD_BYTES,
    ORIGIN_RECORDS,
    RUNNER_RECORDS,
    CancelSession,
    OpenSession,
    OriginRecord,
    Prefilled,
    RunnerRecord,
    Sampling,
    SessionFailed,
    Token,
)
from meshinfer.wire.runner_control import (
    AGENT_MESSAGES,
    RUNNER_MESSAGES,
    AgentMessage,
    DialChannel,
    ExpectChannel,
    Heartbeat,
    Linked,
    Listening,
    Loaded,
    LoadSeat,
    Rebind,
    RunnerMessage,
)

PATIENCE = 90.0
"""A runner starts in 3 s alone and in 30 s beside seven others on two cores. Only a failure waits so long."""
INSTANCE = InstanceId("0123456789abcdef")
EPOCH = 7
LAYERS = 6
VOCABULARY = 96
GREEDY = Sampling(seed=0, temperature=0)


def write_tiny_llama(directory: Path, seed: int = 3, layers: int = LAYERS, **changed: Any) -> Path:
    """A llama of random weights, a few hundred kilobytes, as mlx-lm stores one."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    config = {
        "model_type": "llama", "hidden_size": 32, "num_hidden_layers": layers, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY,
        "tie_word_embeddings": False, "rope_theta": 10000.0, "max_position_embeddings": 4096,
    } | changed  # fmt: skip
    mx.random.seed(seed)
    model = Model(ModelArgs.from_dict(config))
    # Wider than mlx-lm's own initial weights: logits far enough apart that batching's last bits do not matter.
    weights = {name: mx.random.normal(w.shape) * 0.3 for name, w in tree_flatten(model.parameters())}
    directory.mkdir(parents=True)
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(weights, "model.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def plain_greedy(directory: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What mlx-lm itself generates with the whole model."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    model, _ = load_model(directory)
    return [int(token) for token, _ in generate_step(mx.array(list(prompt)), model, max_tokens=count)]


def session(
    prompt: Sequence[int],
    count: int,
    *,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
    emitted: int = 0,
    **changed: Any,
) -> OpenSession:
    fields: dict[str, Any] = {
        "session_id": SessionId(secrets.token_hex(16)),
        "instance_id": INSTANCE,
        "epoch": EPOCH,
        "token_ids": tuple(prompt),
        "emitted": emitted,
        "max_new_tokens": count,
        "stop_token_ids": tuple(stop),
        "sampling": sampling,
    } | changed
    return OpenSession(**fields)


class RunnerUnderTest:
    """One runner process and the agent's end of its socket pair."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "meshinfer.runner", "seat", "--fd", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self._said = threading.Condition()
        self.messages: list[RunnerMessage] = []
        """All that it said but heartbeats, in order."""
        self.heartbeats: list[Heartbeat] = []
        self.gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def send(self, message: AgentMessage) -> None:
        body = AGENT_MESSAGES.encode(message)
        self.socket.sendall(struct.pack(">I", len(body)) + body)

    def wait_for(self, kind: type[Any], matches: Callable[[Any], bool] = lambda _: True) -> Any:
        """The first message of that kind that matches; heartbeats count from now on."""
        beats = len(self.heartbeats)

        def found() -> Any:
            source = self.heartbeats[beats:] if kind is Heartbeat else self.messages
            return next((m for m in source if isinstance(m, kind) and matches(m)), None) or self.gone

        with self._said:
            self._said.wait_for(found, PATIENCE)
            result = found()
        assert isinstance(result, kind), f"no {kind.__name__}; it said {self.messages}, code {self.process.poll()}"
        return result

    def wait_for_nth(self, kind: type[Any], count: int) -> None:
        with self._said:
            self._said.wait_for(lambda: self._count(kind) >= count or self.gone, PATIENCE)
        assert self._count(kind) >= count, f"it said {self.messages}, code {self.process.poll()}"

    def _count(self, kind: type[Any]) -> int:
        return sum(isinstance(message, kind) for message in self.messages)

    def wait_exit(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self, signal_number: int = signal.SIGKILL) -> None:
        self.process.send_signal(signal_number)

    def close(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()

    def _listen(self) -> None:
        file = self.socket.makefile("rb")
        try:
            while header := file.read(4):
                message = RUNNER_MESSAGES.decode(file.read(struct.unpack(">I", header)[0]))
                with self._said:
                    (self.heartbeats if isinstance(message, Heartbeat) else self.messages).append(message)
                    self._said.notify_all()
        except (OSError, ValueError, struct.error):
            pass
        with self._said:
            self.gone = True
            self._said.notify_all()


class OriginUnderTest:
    """An origin's channels to head and last stage, with plain threads."""

    def __init__(self, certificate: Certificate, head: SecureSocket, last: SecureSocket) -> None:
        self.certificate = certificate
        self._channels = [head] if head is last else [head, last]
        self._records: dict[str, queue.Queue[RunnerRecord]] = {}
        self._lock = threading.Lock()
        for channel in self._channels:
            threading.Thread(target=self._read, args=(channel,), daemon=True).start()

    def send(self, record: OriginRecord) -> None:
        (data,) = encode_frame(Frame(FrameKind.RECORD, 0, 0, ORIGIN_RECORDS.encode(record)))
        self._channels[0].send_all(data)

    def open(self, record: OpenSession) -> OpenSession:
        self._queue(record.session_id)
        self.send(record)
        return record

    def next_record(self, record: OpenSession) -> RunnerRecord:
        return self._queue(record.session_id).get(timeout=PATIENCE)

    def next_token(self, record: OpenSession) -> Token:
        while True:
            got = self.next_record(record)
            if not isinstance(got, Prefilled):
                assert isinstance(got, Token), got
                return got

    def tokens(self, record: OpenSession) -> list[Token]:
        """All that are still to come."""
        got = [self.next_token(record)]
        while not got[-1].finish:
            got.append(self.next_token(record))
        return got

    def ids(self, record: OpenSession) -> list[int]:
        return [token.token_id for token in self.tokens(record)]

    def failure(self, record: OpenSession) -> SessionFailed:
        while not isinstance(got := self.next_record(record), SessionFailed):
            pass
        return got

    def cancel(self, record: OpenSession) -> None:
        self.send(CancelSession(record.session_id))

    def close(self) -> None:
        for channel in self._channels:
            channel.shut_down()

    def _queue(self, session_id: str) -> queue.Queue[RunnerRecord]:
        with self._lock:
            return self._records.setdefault(session_id, queue.Queue())

    def _read(self, channel: SecureSocket) -> None:
        reader = FrameReader((FrameKind.RECORD,))
        try:
            while (count := channel.recv_into(reader.buffer())) > 0:
                if (frame := reader.advance(count)) is not None:
                    record = RUNNER_RECORDS.decode(frame.control, MAX_RECORD_BYTES)
                    self._queue(record.session_id).put(record)
        except OSError:
            pass
        channel.close()


class PipelineUnderTest:
    """An instance of some seats on this machine, each a process."""

    def __init__(
        self,
        model: Path,
        cuts: Sequence[int] = (),
        *,
        layers: int = LAYERS,
        context: int = 512,
        concurrency: int = 4,
        chunk: int = 16,
    ) -> None:
        edges = [0, *cuts, layers]
        seats = tuple(Seat(NodeId(f"node{i}"), a, b) for i, (a, b) in enumerate(itertools.pairwise(edges)))
        self.placement = Placement(ModelId("tiny"), "digest", layers, "pipeline", "libp2p", context, concurrency, seats)
        self.epoch = EPOCH
        self.chunk = chunk
        self.runners = [RunnerUnderTest() for _ in seats]
        for index in range(len(seats)):
            self.load(index, model)
        self.link_all()

    def load(self, index: int, model: Path) -> None:
        message = LoadSeat(str(model), INSTANCE, self.epoch, self.placement, index, "127.0.0.1", self.chunk, 0)
        self.runners[index].send(message)

    def link_all(self) -> None:
        linked = [sum(isinstance(message, Linked) for message in runner.messages) for runner in self.runners]
        last = len(self.runners) - 1
        for index in range(last):
            self.link(index, index + 1, "activations")
        if last:
            self.link(last, 0, "samples")
        for runner, before in zip(self.runners, linked, strict=True):
            runner.wait_for(Loaded)
            runner.wait_for_nth(Linked, before + 1)

    def replace(self, seat: int, model: Path) -> None:
        """Another process takes the place of `seat`; the others go on in the next epoch with what they have loaded."""
        self.epoch += 1
        self.runners[seat].close()
        for index, runner in enumerate(self.runners):
            if index != seat:
                runner.send(Rebind(self.epoch, self.placement, index))
        self.runners[seat] = RunnerUnderTest()
        self.load(seat, model)
        self.link_all()

    def expect(self, seat: int, role: ChannelRole, from_seat: int, certificate_der: bytes) -> ChannelOffer:
        return self.expect_of(self.runners[seat], role, from_seat, certificate_der)

    @staticmethod
    def expect_of(runner: RunnerUnderTest, role: ChannelRole, from_seat: int, certificate_der: bytes) -> ChannelOffer:
        listening: Listening = runner.wait_for(Listening)
        token = secrets.token_bytes(32)
        runner.send(ExpectChannel(role, from_seat, certificate_der, token, 60.0))
        return ChannelOffer(("127.0.0.1",), listening.port, listening.certificate_der, token)

    @staticmethod
    def offer_of(
        listener: Listener, own: Certificate, role: ChannelRole, from_seat: int, certificate_der: bytes
    ) -> ChannelOffer:
        """The test's own listener expects that seat."""
        token = secrets.token_bytes(32)
        listener.expect(ExpectChannel(role, from_seat, certificate_der, token, 60.0))
        return ChannelOffer(("127.0.0.1",), listener.port, own.der, token)

    def link(self, one: int, other: int, role: ChannelRole) -> None:
        own: Listening = self.runners[one].wait_for(Listening)
        offer = self.expect(other, role, one, own.certificate_der)
        self.runners[one].send(DialChannel(role, other, offer))

    def dial(self, seat: int, role: ChannelRole, from_seat: int, certificate: Certificate) -> SecureSocket:
        return dial(self.expect(seat, role, from_seat, certificate.der), certificate, PATIENCE)

    def origin(self, certificate: Certificate | None = None) -> OriginUnderTest:
        certificate = certificate or make_certificate()
        last = self.dial(len(self.runners) - 1, "origin", -1, certificate)
        head = last if len(self.runners) == 1 else self.dial(0, "origin", -1, certificate)
        return OriginUnderTest(certificate, head, last)

    def close(self) -> None:
        for runner in self.runners:
            runner.close()
