"""The real transport: its home, its port, its peers that die, and what it shows of itself."""

from __future__ import annotations

import importlib.metadata
import ipaddress
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import ifaddr
import pytest
import trio
import trio.testing
from conftest import KEY, OTHER_KEY, PATIENCE_SECONDS, Nodes, connect, next_event, until
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.rsa import create_new_key_pair as create_rsa_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.stream.exceptions import StreamEOF, StreamError
from libp2p.peer.id import ID
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.security_multistream import SecurityMultistream
from libp2p.stream_muxer.yamux.yamux import TYPE_WINDOW_UPDATE, Yamux

from meshinfer.base.errors import BadInput, DeadlineExceeded, MeshinferError, PeerLost, ProtocolError
from meshinfer.base.ids import NodeId
from meshinfer.transport import addresses
from meshinfer.transport.addresses import dialable_hosts, format_address, parse_address
from meshinfer.transport.base import MAX_CALL_BYTES, KeyCopied, PeerConnected, PeerDisconnected
from meshinfer.transport.home_lock import one_agent
from meshinfer.transport.libp2p import hardening
from meshinfer.transport.libp2p.connections import CountedTcp
from meshinfer.transport.libp2p.identity import load_or_make_identity, node_id_of, peer_id_of
from meshinfer.transport.mesh_key import MeshKey

CODE = "abacus abdomen abdominal abide abiding ability"


@asynccontextmanager
async def in_a_process(home: Path):
    """A node in a process of its own: (process, node id, address)."""
    command = [sys.executable, str(Path(__file__).with_name("node_process.py")), str(home), CODE]
    process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = b""
        with trio.fail_after(60):
            while not line.endswith(b"\n"):
                line += await process.stdout.receive_some()
        node_id, address = line.decode().split()
        yield process, NodeId(node_id), address
    finally:
        if process.returncode is None:
            process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


# --- identity and home --------------------------------------------------------------------------


def test_an_identity_is_made_once_and_only_its_owner_can_read_it(tmp_path):
    keys = load_or_make_identity(tmp_path / "home")
    assert load_or_make_identity(tmp_path / "home").private_key.to_bytes() == keys.private_key.to_bytes()
    (file,) = (tmp_path / "home").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", bytes(100), create_rsa_key_pair().private_key.serialize(), bytes(10_000)],
    ids=["empty", "garbage", "zeros", "rsa", "too large"],
)
def test_a_damaged_identity_is_an_error_and_is_left_alone(tmp_path, content):
    file = tmp_path / "identity.key"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(BadInput, match=r"identity\.key"):
        load_or_make_identity(tmp_path)
    assert file.read_bytes() == content


def test_every_truncation_of_an_identity_is_an_error(tmp_path):
    load_or_make_identity(tmp_path)
    file = tmp_path / "identity.key"
    whole = file.read_bytes()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(BadInput):
            load_or_make_identity(tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_an_identity_that_others_could_read_is_an_error(tmp_path, mode):
    load_or_make_identity(tmp_path)
    (tmp_path / "identity.key").chmod(mode)
    with pytest.raises(BadInput, match="chmod 600"):
        load_or_make_identity(tmp_path)


def test_node_ids_are_read_strictly():
    keys = create_new_key_pair()
    node_id = node_id_of(peer_id_of(NodeId(node_id_of_keys(keys))))
    assert node_id.startswith("12D3KooW")
    rsa = node_id_of_keys(create_rsa_key_pair())
    for wrong in ("", node_id[:-1], node_id + "1", " " + node_id, "1" + node_id, rsa, "0OIl", "é", "x" * 100_000):
        with pytest.raises(ProtocolError):
            peer_id_of(NodeId(wrong))


def node_id_of_keys(keys) -> str:

    return ID.from_pubkey(keys.public_key).to_base58()


def test_a_second_agent_in_one_home_is_refused(tmp_path):
    with (
        one_agent(tmp_path / "home"),
        pytest.raises(BadInput, match=rf"another agent \(pid {os.getpid()}\) runs in"),
        one_agent(tmp_path / "home"),
    ):
        pass
    with one_agent(tmp_path / "home"):
        pass


async def test_a_node_that_starts_again_is_the_same_node(nodes: Nodes):
    first = await nodes.start("home")
    await nodes.stop(first)
    assert (await nodes.start("home")).node_id == first.node_id


def test_a_lock_dies_with_its_process(tmp_path):
    holder = "import sys, time; from pathlib import Path; from meshinfer.transport.home_lock import one_agent\n"
    holder += "with one_agent(Path(sys.argv[1])):\n print('held', flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", holder, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(BadInput, match=f"pid {process.pid}"), one_agent(tmp_path):
            pass
        process.kill()
    with one_agent(tmp_path):
        pass


# --- ports and addresses ------------------------------------------------------------------------


@pytest.mark.parametrize("reuse", [False, True], ids=["alone", "shared"])
async def test_a_port_in_use_is_named(nodes: Nodes, reuse):
    with socket.socket() as taken:
        if reuse:  # as libp2p's own listener does: two agents would silently share a port
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        transport = nodes.make("home", listen_port=port)
        with pytest.raises(BadInput, match=rf"127\.0\.0\.1 port {port}.*choose another"):
            await transport.run()
    await nodes.start("home", listen_port=port)


async def test_a_host_of_another_machine_is_named(nodes: Nodes):
    with pytest.raises(BadInput, match=r"203\.0\.113\.7"):
        await nodes.make("home", listen_host="203.0.113.7").run()


async def test_a_node_on_every_interface_names_each_and_no_wildcard(nodes: Nodes):
    transport = await nodes.start("home", listen_host="0.0.0.0", include_loopback=True)
    hosts = [parse_address(address)[0] for address in transport.addresses()]
    assert hosts
    assert not any(ipaddress.ip_address(host).is_unspecified for host in hosts)
    assert "127.0.0.1" in hosts
    other = await nodes.start("other")
    for address in transport.addresses():
        assert await other.dial(address, None, PATIENCE_SECONDS) == transport.node_id


@pytest.mark.parametrize("listen_host", ["::1", "::"])
async def test_ipv6_works(nodes: Nodes, listen_host):
    try:
        transport = await nodes.start("home", listen_host=listen_host, include_loopback=True)
    except BaseExceptionGroup:
        pytest.skip("no IPv6 here")
    assert transport.addresses()[-1].startswith("[::1]:")
    dialler = await nodes.start("dialler")
    assert await dialler.dial(transport.addresses()[-1], transport.node_id, PATIENCE_SECONDS) == transport.node_id
    assert dialler.peer_host(transport.node_id) == "::1"
    await next_event(transport, PeerConnected)
    assert transport.peer_host(dialler.node_id) == "::1"


def adapter(name: str, *ips: str) -> ifaddr.Adapter:
    return ifaddr.Adapter(
        name, name, [ifaddr.IP((ip, 0, 0), 64, name) if ":" in ip else ifaddr.IP(ip, 24, name) for ip in ips]
    )


def test_only_what_others_can_dial_is_announced_the_likeliest_first(monkeypatch):
    adapters = [
        adapter("lo", "127.0.0.1", "::1"),
        adapter("docker0", "172.17.0.1"),
        adapter("br-0123456789ab", "172.18.0.1"),
        adapter("veth1a2b", "fe80::1"),
        adapter("virbr0", "192.168.122.1"),
        adapter("cni0", "10.42.0.1"),
        adapter("bridge100", "192.168.64.1"),
        adapter("en5", "169.254.7.7"),
        adapter("bridge0", "10.9.9.9"),
        adapter("wlan0", "192.168.1.20", "fe80::2", "fd00::20", "2001:db8::20"),
        adapter("tailscale0", "100.64.0.1", "fd7a::1"),
        adapter("down", "0.0.0.0"),
    ]
    monkeypatch.setattr(addresses.ifaddr, "get_adapters", lambda: adapters)
    ipv4 = ("10.9.9.9", "100.64.0.1", "192.168.1.20")
    ipv6 = ("2001:db8::20", "fd00::20", "fd7a::1")
    assert dialable_hosts(["0.0.0.0", "::"], include_loopback=False) == (*ipv4, *ipv6, "169.254.7.7")
    assert dialable_hosts(["0.0.0.0"], include_loopback=False) == (*ipv4, "169.254.7.7")
    assert dialable_hosts(["0.0.0.0"], include_loopback=True) == (*ipv4, "169.254.7.7", "127.0.0.1")
    assert dialable_hosts(["172.17.0.1"], include_loopback=False) == ("172.17.0.1",)
    assert dialable_hosts(["127.0.0.1"], include_loopback=False) == ("127.0.0.1",)
    monkeypatch.setattr(addresses.ifaddr, "get_adapters", lambda: adapters[:5])
    assert dialable_hosts(["0.0.0.0"], include_loopback=False) == ("127.0.0.1",)
    monkeypatch.setattr(
        addresses.ifaddr, "get_adapters", lambda: [adapter(f"eth{n}", f"10.0.{n}.1") for n in range(100)]
    )
    assert len(dialable_hosts(["0.0.0.0"], include_loopback=True)) == addresses.MAX_ADDRESSES


@pytest.mark.parametrize("host", ["192.168.1.20", "fd00::20", "laptop.local"])
def test_an_address_is_read_as_it_is_written(host):
    assert parse_address(format_address(host, 7001)) == (host, 7001)


@pytest.mark.parametrize(
    "text", ["", ":1", "a:", "a:0", "a:65536", "a:-1", "a: 1", "a:1x", "a:\u0661", "::1:80", "[]:80", "x" * 300 + ":80"]
)
def test_what_is_no_address_is_said(text):
    with pytest.raises(BadInput, match="host:port"):
        parse_address(text)


# --- peers that go away -------------------------------------------------------------------------


async def test_a_killed_process_is_noticed_and_welcomed_back(nodes: Nodes, tmp_path):
    here = await nodes.start("here")
    async with in_a_process(tmp_path / "there") as (process, node_id, address):
        await here.dial(address, node_id, PATIENCE_SECONDS)
        assert await here.call(node_id, "echo", b"alive", PATIENCE_SECONDS) == b"alive"
        process.kill()
        assert await next_event(here, PeerDisconnected) == PeerDisconnected(node_id)
    with pytest.raises(PeerLost):
        await here.call(node_id, "echo", b"", PATIENCE_SECONDS)
    with pytest.raises(PeerLost):
        await here.dial(address, node_id, PATIENCE_SECONDS)
    async with in_a_process(tmp_path / "there") as (_, again, address):
        assert again == node_id
        # No negative cache: the library's would refuse for 60 s.
        await here.dial(address, node_id, PATIENCE_SECONDS)
        assert await here.call(node_id, "echo", b"back", PATIENCE_SECONDS) == b"back"


async def test_a_stopped_process_is_noticed_though_its_sockets_stay_open(nodes: Nodes, tmp_path):
    here = await nodes.start("here", silence_seconds=0.2, ping_timeout_seconds=1.0)
    async with in_a_process(tmp_path / "there") as (process, node_id, address):
        await here.dial(address, node_id, PATIENCE_SECONDS)
        process.send_signal(signal.SIGSTOP)
        with pytest.raises((PeerLost, DeadlineExceeded)):
            await here.call(node_id, "echo", bytes(200_000), PATIENCE_SECONDS)
        assert await next_event(here, PeerDisconnected) == PeerDisconnected(node_id)
        process.send_signal(signal.SIGCONT)
        await until(lambda: node_id not in here.peers())
        await here.dial(address, node_id, PATIENCE_SECONDS)
        assert await here.call(node_id, "echo", b"awake", PATIENCE_SECONDS) == b"awake"


async def test_an_idle_connection_stays(nodes: Nodes):
    """Both sides ping, and hear each other, more than once."""
    one, other = [await nodes.start(name, silence_seconds=0.05, ping_timeout_seconds=5.0) for name in ("one", "other")]
    await connect(one, other)
    (link,) = one._connections.of(peer_id_of(other.node_id))
    heard = link.tcp.bytes_read
    await until(lambda: link.tcp.bytes_read > heard + 5000)
    assert one._connections.of(peer_id_of(other.node_id))[0].tcp is link.tcp
    assert one.events.receive_nowait() == PeerConnected(other.node_id)
    with pytest.raises(trio.WouldBlock):
        one.events.receive_nowait()


async def test_who_never_answers_a_dial_is_given_up_in_time(nodes: Nodes):
    here = await nodes.start("here")
    (silent,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with silent:
        with pytest.raises(DeadlineExceeded):
            await here.dial(f"127.0.0.1:{silent.socket.getsockname()[1]}", None, 0.3)


async def test_more_connections_than_250_in_a_lifetime_leave_the_door_open(nodes: Nodes):
    """The library's own listener leaks a slot for each and is closed for ever after 250; 6 times 43 are 258."""
    server = await nodes.start("server")
    clients = [await nodes.start(f"client{number}") for number in range(6)]
    before = trio.lowlevel.current_statistics().tasks_living

    async def come_and_go(client) -> None:
        for number in range(43):
            assert await client.dial(server.addresses()[0], None, PATIENCE_SECONDS) == server.node_id
            if number % 21 == 0:
                assert await client.call(server.node_id, "echo", b"%d" % number, PATIENCE_SECONDS) == b"%d" % number
            (link,) = client._connections.of(peer_id_of(server.node_id))
            await client._connections.close(link)
            await next_event(client, PeerDisconnected)
            await until(lambda: client.node_id not in server.peers())

    async def read_events() -> None:
        async for _ in server.events:
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_events)
        async with trio.open_nursery() as comings:
            for client in clients:
                comings.start_soon(come_and_go, client)
        nursery.cancel_scope.cancel()
    await until(lambda: trio.lowlevel.current_statistics().tasks_living <= before)
    assert server._connections._links == server._connections._pending == {}
    await connect(clients[0], server)
    assert await clients[0].call(server.node_id, "echo", b"still", PATIENCE_SECONDS) == b"still"


async def test_a_peer_has_few_connections_and_the_newest_are_kept(nodes: Nodes):
    server, client = await nodes.start("server"), await nodes.start("client")
    host, port = parse_address(server.addresses()[0])
    for _ in range(6):
        link = await client._connections.dial(host, port, None)
        nodes.nursery.start_soon(client._connections.watch, link)
    await until(lambda: len(server._connections.of(peer_id_of(client.node_id))) == 3)
    assert server.peers() == {client.node_id}
    assert await client.call(server.node_id, "echo", b"newest", PATIENCE_SECONDS) == b"newest"
    await client._connections.close(link)
    assert await client.call(server.node_id, "echo", b"the one before", PATIENCE_SECONDS) == b"the one before"
    assert server.peers() == {client.node_id}


async def test_calls_move_to_a_newer_connection_and_those_under_way_end_on_the_old(nodes: Nodes):
    server, client = await nodes.start("server"), await nodes.start("client")
    release, asked = trio.Event(), trio.Event()

    async def slow(_peer: NodeId, payload: bytes) -> bytes:
        asked.set()
        await release.wait()
        return payload

    server.serve("slow", slow)
    await connect(client, server)
    answers: list[bytes] = []

    async def call() -> None:
        answers.append(await client.call(server.node_id, "slow", b"old", PATIENCE_SECONDS))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(call)
        await asked.wait()
        link = await client._connections.dial(*parse_address(server.addresses()[0]), None)
        nodes.nursery.start_soon(client._connections.watch, link)
        assert await client.call(server.node_id, "echo", b"new", PATIENCE_SECONDS) == b"new"
        release.set()
    assert answers == [b"old"]


@pytest.mark.parametrize("error", [ValueError("bug"), ConnectionResetError(), trio.TooSlowError(), StreamEOF()])
async def test_an_error_in_a_stream_handler_costs_that_stream_alone(nodes: Nodes, error):
    """The library would end the whole node, or, for the last, leave a connection that only looks alive."""
    server, client = await nodes.start("server"), await nodes.start("client")

    async def fail(stream) -> None:
        await stream.read(1)
        raise error

    server._host.set_stream_handler(TProtocol("/test/fails"), fail)
    await connect(client, server)
    for _ in range(3):
        stream = await client._host.new_stream(peer_id_of(server.node_id), [TProtocol("/test/fails")])
        await stream.write(b"x")
        with trio.fail_after(PATIENCE_SECONDS), pytest.raises(StreamError):
            await stream.read(1)
        assert await client.call(server.node_id, "echo", b"well?", PATIENCE_SECONDS) == b"well?"


async def test_a_peer_that_dies_is_told_in_one_line_and_is_no_exception(nodes: Nodes, caplog):
    """Each death left a page of traceback in every log."""
    here, there = await nodes.start("here"), await nodes.start("there")
    await connect(there, here)
    assert await there.call(here.node_id, "echo", b"alive", PATIENCE_SECONDS) == b"alive"
    told = f"a stream of {there.node_id} ended"
    with caplog.at_level(logging.DEBUG, logger=hardening.__name__):
        await nodes.stop(there)
        assert await next_event(here, PeerDisconnected) == PeerDisconnected(there.node_id)
        await until(lambda: any(told in record.getMessage() for record in caplog.records))
    assert [record for record in caplog.records if record.name == hardening.__name__ and record.exc_info] == []


# --- what keeps strangers out -------------------------------------------------------------------


async def test_only_of_a_member_more_is_taken_in_than_was_asked_for():
    """Noise asks for the length of each message apart; a stranger could fill memory that nobody asked for."""
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    client = await trio.testing.open_stream_to_socket_listener(listener)
    tcp = CountedTcp(await listener.accept())
    await client.send_all(b"0123456789")
    assert await tcp.read(2) == b"01"
    assert tcp.bytes_read == 2
    tcp.trust()
    assert await tcp.read(1) == b"2"
    assert tcp.bytes_read == 10, "what was there is taken in at once"
    assert await tcp.read(3) == b"345"
    assert await tcp.read() == b"6789"
    await client.aclose()
    assert await tcp.read(1) == b""
    await tcp.abort()
    await listener.aclose()


async def test_plaintext_is_not_spoken(nodes: Nodes):
    """libp2p's default takes it, and then anybody can claim any id."""
    victim = await nodes.start("victim")
    tcp = CountedTcp(await trio.open_tcp_stream(*parse_address(victim.addresses()[0])))
    claim = InsecureTransport(create_new_key_pair())
    selecting = SecurityMultistream({TProtocol(PLAINTEXT_PROTOCOL_ID): claim})
    with pytest.raises(Exception, match="protocol"):
        await selecting.secure_outbound(RawConnection(tcp, True), peer_id_of(victim.node_id))
    await tcp.abort()
    assert set(victim._swarm.upgrader.security_multistream.transports) == {"/noise"}
    assert set(victim._swarm.upgrader.muxer_multistream.transports) == {"/yamux/1.0.0"}


async def test_nothing_is_served_that_we_do_not_need(nodes: Nodes):
    victim = await nodes.start("victim")
    served = {str(protocol) for protocol in victim._host.multiselect.get_protocols()}
    assert served == {"/ipfs/ping/1.0.0", "/meshsub/1.1.0", "/meshinfer/calls/1"}


async def test_the_library_cannot_dial_around_the_proof(nodes: Nodes):
    one, other = await nodes.start("one"), await nodes.start("other")
    assert one._swarm.transport_manager.get_transports() == []
    assert one._swarm.listeners == {}
    with pytest.raises(Exception, match="No known addresses"):
        await one._host.new_stream(peer_id_of(other.node_id), [TProtocol("/meshinfer/calls/1")])


async def test_the_key_is_in_no_log_and_a_stranger_is_told_of_once(nodes: Nodes, caplog):
    caplog.set_level(logging.DEBUG)
    member, stranger = await nodes.start("member"), await nodes.start("stranger", OTHER_KEY)
    friend = await nodes.start("friend")
    await connect(friend, member)
    for _ in range(3):
        with pytest.raises(PeerLost) as caught:
            await stranger.dial(member.addresses()[0], None, PATIENCE_SECONDS)
    await until(lambda: member.statistics().strangers_refused == 3)
    told = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and f"refused node {stranger.node_id}" in record.getMessage()
    ]
    assert len(told) == 1
    assert "meshinfer join CODE" in told[0]
    for key in (KEY, OTHER_KEY):
        for shape in (key._MeshKey__secret.hex(), repr(key._MeshKey__secret)):
            assert shape not in caplog.text
            assert shape not in str(caught.value)
    for word in ("abdominal", "zoology"):
        assert word not in caplog.text


async def test_open_meshes_find_each_other_and_nobody_else(nodes: Nodes):
    one, other = await nodes.start("one", MeshKey.open_mesh()), await nodes.start("other", MeshKey.open_mesh())
    closed = await nodes.start("closed")
    await connect(one, other)
    with pytest.raises(PeerLost):
        await one.dial(closed.addresses()[0], None, PATIENCE_SECONDS)


class Without:
    """A part of the library, as if this name had never been in it."""

    def __init__(self, whole: object, name: str) -> None:
        self._whole, self._name = whole, name

    def __getattr__(self, name: str) -> object:
        if name == self._name:
            raise AttributeError(name)
        return getattr(self._whole, name)


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        ("host", hardening._HOST_NAMES),
        ("pubsub", hardening._PUBSUB_NAMES),
        ("router", hardening._ROUTER_NAMES),
        ("swarm", hardening._SWARM_NAMES),
        ("upgrader", hardening._UPGRADER_NAMES),
    ],
)
def test_a_library_that_lost_a_name_we_need_is_refused_at_start(nodes_sync, owner, names):
    assert importlib.metadata.version("libp2p") == hardening.PIN
    for name in names:
        made = nodes_sync.make("home")
        host, swarm, pubsub, router = made._host, made._swarm, made._pubsub, made._router
        hardening.check_names(host, pubsub, router)
        if owner == "upgrader":
            swarm.upgrader = Without(swarm.upgrader, name)
        elif owner == "swarm":
            host._network = Without(swarm, name)
        else:
            parts = {"host": host, "pubsub": pubsub, "router": router}
            parts[owner] = Without(parts[owner], name)
            host, pubsub, router = parts.values()
        with pytest.raises(MeshinferError, match=rf"\.{name}, .*libp2p {hardening.PIN}.*pip install"):
            hardening.check_names(host, pubsub, router)


@pytest.fixture
def nodes_sync(tmp_path) -> Nodes:
    return Nodes(None, tmp_path, {}, {})


# --- the end ------------------------------------------------------------------------------------


async def test_ending_in_the_middle_of_everything_is_clean(nodes: Nodes):
    hub = await nodes.start("hub")
    others = [await nodes.start(f"other{number}") for number in range(3)]

    async def slow(_peer: NodeId, _payload: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    hub.serve("slow", slow)

    async def call(caller) -> None:
        with pytest.raises(PeerLost):
            await caller.call(hub.node_id, "slow", bytes(100_000), PATIENCE_SECONDS)

    async with trio.open_nursery() as nursery:
        for other in others:
            await connect(other, hub)
            nursery.start_soon(call, other)
        await hub.publish(b"last words")
        await until(lambda: hub.statistics().calls_served == 3)
        await nodes.stop(hub)
    for other in others:
        await until(lambda other=other: other.peers() == frozenset())
    await nodes.start("hub", listen_port=0)


async def test_a_node_that_was_never_run_can_be_asked_everything(nodes: Nodes):
    idle = nodes.make("idle")
    assert idle.addresses() == ()
    assert idle.peers() == frozenset()
    await idle.publish(b"into the void")
    with pytest.raises(PeerLost):
        await idle.dial("127.0.0.1:1", None, 1)
    with pytest.raises(PeerLost):
        await idle.call(NodeId("nobody"), "echo", b"", 1)
    assert idle.statistics().gossip_sent == 0


@pytest.mark.parametrize("checkpoints", range(0, 60, 3))
async def test_starting_can_be_cancelled_anywhere(nodes: Nodes, checkpoints):
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(nodes.make("home").run)
            for _ in range(checkpoints):
                await trio.lowlevel.checkpoint()
            scope.cancel()
    await nodes.start("home")


async def test_small_messages_are_not_each_acknowledged_and_large_ones_never_wait_for_it(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
):
    """An acknowledgement of the muxer's per read was a third of what two idle nodes said to each other."""
    sent: list[int] = []
    write_frame = Yamux._write_frame

    async def counted(self: Yamux, frame: bytes) -> None:
        sent.append(frame[1])
        await write_frame(self, frame)

    monkeypatch.setattr(Yamux, "_write_frame", counted)
    one, other = await nodes.start("one"), await nodes.start("other")
    await connect(one, other)
    with trio.fail_after(PATIENCE_SECONDS):
        await one.call(other.node_id, "echo", b"opens the line", PATIENCE_SECONDS)
        sent.clear()
        for _ in range(200):
            await one.call(other.node_id, "echo", b"small", PATIENCE_SECONDS)
        assert sent.count(TYPE_WINDOW_UPDATE) < 40, "gossip may have begun beside it"
        for _ in range(20):  # twenty windows each way
            assert len(await one.call(other.node_id, "echo", bytes(MAX_CALL_BYTES), PATIENCE_SECONDS)) == MAX_CALL_BYTES


async def test_a_copied_key_is_proved_to_both_and_an_own_address_is_no_copy(nodes: Nodes):
    one = await nodes.start("one")
    home = nodes.directory / "copy"
    home.mkdir(mode=0o700)
    shutil.copy(nodes.directory / "one" / "identity.key", home / "identity.key")
    (home / "identity.key").chmod(0o600)
    copy = nodes.make("copy")
    assert copy.node_id == one.node_id
    with pytest.raises(PeerLost):
        await one.dial(one.addresses()[0], None, PATIENCE_SECONDS)
    async with trio.open_nursery() as nursery:
        await nursery.start(copy.run)
        with pytest.raises(PeerLost, match="with this node's key"):
            await copy.dial(one.addresses()[0], None, PATIENCE_SECONDS)
        assert await next_event(copy, KeyCopied) == KeyCopied(one.addresses()[0])
        assert await next_event(one, KeyCopied) == KeyCopied(copy.addresses()[0])
        nursery.cancel_scope.cancel()
