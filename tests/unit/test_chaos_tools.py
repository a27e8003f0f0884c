"""What chaos on real agents is made of sees what it is there to see, and does what it says."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from meshinfer.testing.agent_room import AgentRoom
from meshinfer.testing.agent_witness import NEWS_LOOKS, Witness
from meshinfer.testing.bad_channels import CONTROL_PORT, BadChannels
from meshinfer.testing.bad_lines import FIRST_PORT, BadLines
from meshinfer.testing.chaos import Answer, Fault, machine_scenarios, scenarios
from meshinfer.testing.chaos_agents import can_play
from meshinfer.testing.machine_faults import hang, kill_for_memory, kills_for_memory_work, refuse_memory, why_not_hang
from meshinfer.testing.machines import CabledMachines, OneMachine, SkewedClocks, SmallDisks
from meshinfer.testing.neighbours import Round, summary
from meshinfer.testing.proxied_lines import enter_network
from meshinfer.testing.repair_story import came_too_late, phases_of


@pytest.fixture
def witness(tmp_path: Path) -> Witness:
    return Witness(AgentRoom(OneMachine(tmp_path), tmp_path))


def state(
    *, held: int, ran: int, steps: int, recomputed: int = 0, pid: int = 7, outlived: Sequence[str] = ()
) -> dict[str, Any]:
    """Of an agent that holds epoch `held`, and whose runner works in epoch `ran`."""
    runner = {
        "pid": pid, "instance_id": "i", "epoch": ran, "placement_id": "a", "steps": steps, "recomputed_tokens": recomputed
    }  # fmt: skip
    instance = {"instance_id": "i", "epoch": held, "outlived": [{"epoch": 1, "placement_id": key} for key in outlived]}
    return {"instances": [instance], "runners": [runner]}


def test_steps_of_a_stale_epoch_are_a_broken_promise(witness: Witness) -> None:
    for look in range(NEWS_LOOKS + 1):
        witness.look("a", state(held=2, ran=1, steps=10 + look, outlived=["b"]))
    assert [violation[:2] for violation in witness.violations] == ["6:"]


def test_steps_of_the_present_epoch_and_late_reports_of_the_last_are_none(witness: Witness) -> None:
    for look in range(9):
        witness.look("a", state(held=2, ran=2, steps=look))
        witness.look("b", state(held=2, ran=1, steps=10 + min(look, NEWS_LOOKS - 1), pid=8))
        witness.look("c", state(held=2, ran=1, steps=look, pid=9, outlived=["b", "a"]))
    assert witness.violations == set()


def test_recomputed_tokens_are_those_since_the_first_look_also_of_runners_that_died(witness: Witness) -> None:
    witness.look("a", state(held=1, ran=1, steps=0, recomputed=100), is_first=True)
    witness.look("a", state(held=1, ran=1, steps=0, recomputed=130))
    witness.look("a", state(held=2, ran=2, steps=0, recomputed=5, pid=8))
    assert witness.recomputed_tokens == 35


def test_the_longest_pause_is_told_by_what_the_agents_said_until_its_end() -> None:
    now, wall = time.monotonic(), time.time()
    answer = Answer("first", "", 10.0, now - 9.0, times=[now - 8.5, now - 8.0, now - 3.0, now - 2.5])
    faulted_at = wall - 8.0
    story = [
        (0.1, "n0: request 1 goes on after 2 tokens"),
        (0.3, "n1: request 2 goes on after 5 tokens"),
        (0.4, "n1: instance i epoch 2 is placed on n0, n1"),
        (4.0, "n1: seat 1: its layers are loaded, in 0.2 s"),
        (7.0, "n2: seat 0: its layers are loaded, in 0.2 s"),
    ]
    phases = phases_of(story, answer, faulted_at)
    assert phases[:-1] == (("noticed", 0.1), ("placed", 0.4), ("loaded", 4.0))
    name, at = phases[-1]
    assert (name, round(at, 1)) == ("token", 5.0)
    assert phases_of(story, answer, 0.0) == (), "no fault, no phases"
    assert phases_of(story, answer, wall) == (), "that pause was over before this fault"


def test_a_fault_comes_too_late_after_the_answer_or_after_the_repair_that_it_was_to_hit() -> None:
    now, wall = time.monotonic(), time.time()
    answer = Answer("first", "", 10.0, now - 9.0, ended_at=now - 1.0)
    told = [(0.1, "request 1 goes on after 2 tokens"), (1.0, "request 1 is open again, in epoch 2")]
    first, second = Fault("kill", "middle"), Fault("kill", "last", "repair")

    def why(faulted_at: float, after: float) -> str:
        return came_too_late(told, answer, faulted_at, [(first, faulted_at), (second, faulted_at + after)])

    assert why(wall - 5.0, after=0.9) == ""
    assert "kill last: the session was open again" in why(wall - 5.0, after=1.1)
    assert "the answer was there" in why(wall - 0.5, after=0.2)


def test_of_two_equal_faults_the_one_that_came_too_late_is_seen() -> None:
    now, wall = time.monotonic(), time.time()
    answer = Answer("first", "", 10.0, now - 9.0, ended_at=now - 1.0)
    told = [(1.0, "request 1 is open again, in epoch 2")]
    again = Fault("kill runner", "replacement", "repair")
    for struck in ([wall - 3.5, wall - 4.5], [wall - 4.5, wall - 3.5]):
        why = came_too_late(told, answer, wall - 5.0, [(again, at) for at in struck])
        assert why == "kill runner replacement: the session was open again 0.50 s before"


@pytest.fixture
def eater() -> Iterator[subprocess.Popen[str]]:
    """A process that says when it is up, and after a line wants ever more."""
    wants = "held = [bytearray(1 << 26)]; print('up', flush=True); input()\nwhile True: held.append(bytearray(1 << 24))"
    with subprocess.Popen(
        [sys.executable, "-c", wants], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
        process.kill()


@pytest.mark.skipif(not kills_for_memory_work(), reason="no control group for memory can be made here")
def test_the_kernel_takes_the_one_that_was_named(eater: subprocess.Popen[str]) -> None:
    assert kill_for_memory(eater.pid) >= 1
    assert eater.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are a Linux thing")
def test_a_process_is_refused_memory(eater: subprocess.Popen[str]) -> None:
    refuse_memory(eater.pid)
    _, errors = eater.communicate("\n", timeout=10)
    assert eater.returncode == 1
    assert "MemoryError" in errors


COMPUTES = """
import hashlib, threading, time
threading.Thread(target=threading.Event().wait, daemon=True).start()
threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"a", b"b", 2**31 - 1), daemon=True).start()
began = time.process_time()
while time.process_time() < began + 0.1:
    time.sleep(0.01)
while True:
    print(input(), flush=True)
"""
"""Of its three threads the last computes, without Python's lock; the first answers once that has got somewhere."""


@pytest.mark.skipif(bool(why_not_hang()), reason=why_not_hang() or "it can")
def test_of_a_process_that_hangs_one_thread_stands_until_it_is_let_go_or_killed() -> None:
    def states() -> list[str]:
        tasks = sorted(Path(f"/proc/{process.pid}/task").iterdir(), key=lambda task: int(task.name))
        return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]

    def answers() -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("hello\n")
        process.stdin.flush()
        return process.stdout.readline() == "hello\n"

    with subprocess.Popen(
        [sys.executable, "-c", COMPUTES], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert answers()
            let_go = hang(process.pid)
            assert [state == "t" for state in states()] == [False, False, True]
            assert answers()
            let_go()
            assert "t" not in states()
            hang(process.pid)
            assert "t" in states()
        finally:
            process.kill()
        assert process.wait(10) == -signal.SIGKILL


@pytest.mark.skipif(bool(SmallDisks.why_not()), reason=SmallDisks.why_not() or "it can")
def test_a_small_disk_can_be_filled_and_emptied(tmp_path: Path) -> None:
    with SmallDisks(tmp_path) as machines:
        home = machines.move_in("a")
        (home / "kept").write_text("kept")
        machines.fill("a")
        with pytest.raises(OSError, match="No space"):
            (home / "more").write_bytes(bytes(8192))
        machines.empty("a")
        (home / "more").write_bytes(bytes(8192))
        assert (home / "kept").read_text() == "kept"
    assert not home.is_mount()


HEARS = """
import socket
with socket.socket(type=socket.SOCK_DGRAM) as mine:
    mine.bind(("", 7000))
    print("ready", flush=True)
    print(mine.recv(99).decode())
"""
SAYS = """
import socket, sys
with socket.socket(type=socket.SOCK_DGRAM) as mine:
    mine.sendto(sys.argv[2].encode(), (sys.argv[1], 7000))
"""


@pytest.mark.skipif(bool(CabledMachines.why_not()), reason=CabledMachines.why_not() or "it can")
def test_what_is_said_over_a_cut_vanishes_one_way_until_it_is_mended(tmp_path: Path) -> None:
    with CabledMachines(tmp_path) as machines, contextlib.ExitStack() as ends:
        for name in ("a", "b"):
            machines.move_in(name)

        def hearer(name: str) -> subprocess.Popen[str]:
            command = (*machines.prefix(name), sys.executable, "-c", HEARS)
            process = ends.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            ends.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            return process

        def say(name: str, to: str, what: str) -> None:
            host = machines.options(to)[1]
            subprocess.run((*machines.prefix(name), sys.executable, "-c", SAYS, host, what), check=True, timeout=10)

        at_a, at_b = hearer("a"), hearer("b")
        machines.cut(("a", "b"))
        say("a", "b", "this is lost")
        say("b", "a", "this way is open")
        assert at_a.communicate(timeout=10)[0] == "this way is open\n"
        machines.mend(("a", "b"))
        say("a", "b", "open again")
        assert at_b.communicate(timeout=10)[0] == "open again\n"


@pytest.mark.skipif(bool(BadLines.why_not()), reason=BadLines.why_not() or "it can")
def test_agents_on_bad_lines_reach_each_other_over_proxies_only(tmp_path: Path) -> None:
    def on_lines_of_its_own() -> tuple[str, bytes, bytes]:
        """(the only interface, what came over a good line, what came over one that was reset)"""
        with BadLines(tmp_path) as machines:
            for name in ("a", "b"):
                machines.move_in(name)
            host, _, port = machines.options("a")[3].removeprefix("--peer=").partition(":")
            with socket.create_server(("127.0.0.1", FIRST_PORT + 1)) as b, socket.create_connection((host, port)) as a:
                at_b, _ = b.accept()
                with at_b:
                    a.sendall(b"hello")
                    came = at_b.recv(5)
                    machines.lines.reset("b")
                    with contextlib.suppress(ConnectionResetError):
                        return ",".join(name for _, name in socket.if_nameindex()), came, at_b.recv(5)
                    return ",".join(name for _, name in socket.if_nameindex()), came, b""

    def network() -> int:
        return Path("/proc/thread-self/ns/net").stat().st_ino

    # A thread of its own: it enters another network.
    with ThreadPoolExecutor(1) as pool:
        before = pool.submit(network).result(20)
        assert pool.submit(on_lines_of_its_own).result(20) == ("lo", b"hello", b"")
        assert pool.submit(network).result(20) == before


@pytest.mark.skipif(bool(BadChannels.why_not()), reason=BadChannels.why_not() or "it can")
def test_what_is_for_a_machines_runners_comes_over_a_proxy_and_what_is_for_its_agent_does_not(tmp_path: Path) -> None:
    with BadChannels(tmp_path) as machines, contextlib.ExitStack() as ends:
        inside: dict[str, ThreadPoolExecutor] = {}
        for name in ("a", "b"):
            machines.move_in(name)
            inside[name] = ends.enter_context(ThreadPoolExecutor(1))  # a socket is of the network that it is made in
            inside[name].submit(enter_network, Path("/run/netns") / machines.prefix(name)[-1]).result(20)

        def connection(port: int) -> tuple[socket.socket, socket.socket]:
            host = machines.options("b")[1]
            server = ends.enter_context(inside["b"].submit(socket.create_server, (host, port)).result(20))
            at_a = ends.enter_context(inside["a"].submit(socket.create_connection, (host, port), 20).result(20))
            at_b = ends.enter_context(server.accept()[0])
            return at_a, at_b

        def hears(pair: tuple[socket.socket, socket.socket], what: bytes) -> bytes:
            with contextlib.suppress(ConnectionError):
                pair[0].sendall(what)
                return pair[1].recv(99)
            return b""

        control, channel = connection(CONTROL_PORT), connection(40_000)
        assert (hears(control, b"hello"), hears(channel, b"hello")) == (b"hello", b"hello")
        machines.lines.reset("b")
        assert (hears(control, b"again"), hears(channel, b"again")) == (b"again", b"")


def test_every_scenario_of_a_machine_can_be_played_on_one() -> None:
    kinds = (OneMachine, CabledMachines, SmallDisks, BadLines, BadChannels)
    memory = {"starve runner"} if not kills_for_memory_work() else set[str]()
    for scenario in machine_scenarios():
        if memory.isdisjoint(fault.deed for fault in scenario.faults):
            assert any(can_play(scenario, kind, 3) for kind in kinds), scenario.name


@pytest.mark.parametrize(
    "name",
    [
        "deafen head",
        "mute last",
        "bridge: head",
        "split",
        "cut off middle",
        "cut between last",
        "nothing passes from head",
    ],
)
def test_agents_with_cables_of_their_own_can_be_cut_from_each_other_in_every_way(name: str) -> None:
    scenario = next(scenario for scenario in scenarios() if scenario.name.startswith(name))
    assert can_play(scenario, CabledMachines, 5)
    assert not can_play(scenario, OneMachine, 5)


@pytest.mark.skipif(bool(why_not_hang()), reason=why_not_hang() or "it can")
def test_a_runner_can_hang_on_any_machine() -> None:
    hung = [scenario for scenario in scenarios() if scenario.name.startswith("hang runner")]
    assert all(can_play(scenario, OneMachine, 5) for scenario in hung)


@pytest.mark.parametrize(
    "name",
    [
        "kill head and middle at once",
        "kill middle, and the model fits nowhere",
        "split for 10 s",
        "cut off origin for 15 s in a long answer",
        "kill head while more clients ask than there are places",
    ],
)
def test_what_three_agents_cannot_show_is_left_to_the_simulation(name: str) -> None:
    scenario = next(scenario for scenario in scenarios() if scenario.name == name)
    assert not any(can_play(scenario, kind, 3) for kind in (OneMachine, CabledMachines, SmallDisks, SkewedClocks))


def test_where_the_model_fits_nowhere_is_shown_by_as_many_agents_as_are_too_few() -> None:
    name = "kill head and middle at once, and the model fits nowhere"
    scenario = next(scenario for scenario in scenarios() if scenario.name == name)
    assert can_play(scenario, OneMachine, 3)
    assert not can_play(scenario, OneMachine, 5), "three are left"


def test_wrong_clocks_are_only_played_where_clocks_can_be_wrong() -> None:
    about_clocks = [scenario for scenario in scenarios() if "clocks" in scenario.name]
    assert len(about_clocks) == 6
    for scenario in about_clocks:
        assert can_play(scenario, SkewedClocks, 3), scenario.name
        assert not can_play(scenario, OneMachine, 3), scenario.name


@pytest.mark.skipif(bool(SkewedClocks.why_not()), reason=SkewedClocks.why_not() or "it can")
def test_a_machines_clocks_are_wrong_and_its_wall_clock_can_be_set(tmp_path: Path) -> None:
    looks = "import time\nwhile True: print(time.time(), time.monotonic(), flush=True); input()"
    with SkewedClocks(tmp_path) as machines:
        for name in ("a", "b"):
            machines.move_in(name)
        command = [*machines.prefix("b"), sys.executable, "-c", looks]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def hours_ahead() -> tuple[int, int]:
                assert process.stdout is not None
                wall, monotonic = map(float, process.stdout.readline().split())
                return round((wall - time.time()) / 3600), round((monotonic - time.monotonic()) / 3600)

            assert hours_ahead() == (0, 1)
            machines.set_wall_clock("b", -3600.0)
            deadline, seen = time.monotonic() + 10.0, (0, 1)
            while seen != (-1, 1) and time.monotonic() < deadline:
                process.stdin.write("\n")
                process.stdin.flush()
                seen = hours_ahead()
            process.kill()
    assert seen == (-1, 1)


def test_rounds_beside_a_failure_are_summed_up_by_their_medians() -> None:
    gaps = (*(0.02,) * 98, 0.05, 0.4)
    rounds = [Round(True, tuple(gap * factor for gap in gaps), 100.0, 1.0, 0.5) for factor in (1.0, 2.0, 30.0)]
    found = summary(rounds)
    assert (found.p50, found.p99, found.longest) == (0.04, 0.1, 0.8)
    assert (found.cpu_percent, found.busy_share, found.pause_seconds) == (100.0, 1.0, 0.5)
