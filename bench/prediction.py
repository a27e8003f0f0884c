"""Prediction against reality: what previews say of the small real model, and what it then does, in the same run.

    python -m bench.prediction [--rates 20mbit 2mbit] [--runs 5]     (namespaces and tc need root)

Real agents with real runners on this machine. Each case places the model as a person would who sets the layers
(`layers=node=n`), takes the prediction from that very preview, and streams answers from the OpenAI API:

    loopback     1, 2 and 3 stages: what computing and channels cost
    cable        2 stages in two network namespaces, joined by a veth pair
    cable, slow  the same with `tc tbf` at both ends: a decode step's activation is small, a prefill chunk's is not

TTFT is the time to the first streamed token of a prompt that no cache has seen; TPOT is the time from the first token
to the last over their number less one. Predicted and measured are of the same prompt and answer lengths. What the
model cannot know is what else this machine does meanwhile: the load is printed beside each case.

Last line: the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import platformdirs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

from agents import ending, first_line
from mesh import MODEL, room

from meshinfer.base.ids import ModelId
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

WORDS = "The laptops in the room keep what they know of each other in small cards and measure the way between them. "
MEASURED_SECONDS = 240.0
"""For the machines to be probed (when idle) and the links (a burst each)."""
READY_SECONDS = 240.0
CONTEXT = 1024


@dataclass(frozen=True)
class Run:
    ttft_seconds: float
    tpot_seconds: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Case:
    name: str
    stages: int
    load: float
    is_measured: bool
    predicted_ttft: float
    measured_ttft: float
    predicted_rate: float
    measured_rate: float

    @property
    def ttft_error(self) -> float:
        return self.predicted_ttft / self.measured_ttft - 1

    @property
    def rate_error(self) -> float:
        return self.predicted_rate / self.measured_rate - 1


# --- the client, in a process of its own so that it can be in a namespace ---------------------------


def stream(url: str, words: int, tokens: int) -> Run:
    """One streamed answer to a prompt that is new."""
    prompt = f"{uuid.uuid4().hex} " + WORDS * words
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    arrivals: list[float] = []
    usage: dict[str, int] = {}
    begun = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=READY_SECONDS) as answer:
        if answer.status_code != 200:
            raise SystemExit(f"{answer.status_code}: {answer.read().decode()[:500]}")
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            told = json.loads(line[6:])
            usage = told.get("usage") or usage
            if any((choice.get("delta") or {}).get("content") for choice in told["choices"]):
                arrivals.append(time.perf_counter())
    # A token may be half a character, and then comes with the next: the count is the server's.
    count = usage["completion_tokens"]
    return Run(arrivals[0] - begun, (arrivals[-1] - arrivals[0]) / max(1, count - 1), usage["prompt_tokens"], count)


def request(method: str, url: str, body: Any, parameters: Any) -> Any:
    answer = httpx.request(method, url, json=body, params=parameters, timeout=READY_SECONDS)
    if answer.status_code >= 300:
        raise SystemExit(f"{method} {url}: {answer.status_code} {answer.text[:1000]}")
    return answer.json()


class Client:
    """Asks an agent, perhaps from within its namespace."""

    def __init__(self, url: str, prefix: Sequence[str] = ()) -> None:
        self.url, self._prefix = url, prefix

    def ask(self, method: str, path: str, body: Any = None, **parameters: Any) -> Any:
        return self._run("request", method, self.url + path, json.dumps(body), json.dumps(parameters))

    def stream(self, words: int, tokens: int) -> Run:
        return Run(**self._run("stream", self.url, str(words), str(tokens)))

    def _run(self, *arguments: str) -> Any:
        command = [*self._prefix, sys.executable, __file__, "--client", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2 * READY_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"{arguments}: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])


def client_main(arguments: Sequence[str]) -> None:
    if arguments[0] == "stream":
        print(json.dumps(asdict(stream(arguments[1], int(arguments[2]), int(arguments[3])))))
    else:
        method, url, body, parameters = arguments[1:]
        print(json.dumps(request(method, url, json.loads(body), json.loads(parameters))))


# --- cases ------------------------------------------------------------------------------------------


def wait_until(is_so: Callable[[], bool], seconds: float, what: str) -> bool:
    begun = time.monotonic()
    while not is_so():
        if time.monotonic() - begun > seconds:
            print(f"  not after {seconds:.0f} s: {what}", flush=True)
            return False
        time.sleep(1.0)
    return True


def all_measured(client: Client, count: int) -> bool:
    """Whether every machine and every link between them has been measured."""
    nodes = client.ask("GET", "/topology")["nodes"]
    return len(nodes) == count and all(
        node.get("speeds")
        and len(node["links"]) == count - 1
        and all(link["bandwidth_gbps"] and link["channel_rtt_us"] for link in node["links"].values())
        for node in nodes.values()
    )


def case(name: str, client: Client, layers: dict[str, int], runs: int, words: int, tokens: int) -> Case:
    """Place with these layers, predict, run, take it away again."""
    wish = {"model_id": MODEL, "context": CONTEXT, "concurrency": 1, "layers": [f"{n}={k}" for n, k in layers.items()]}

    def preview(prompt: int, output: int) -> Any:
        told = client.ask("GET", "/instance/previews", prompt_tokens=prompt, output_tokens=output, **wish)
        return next(each for each in told["previews"] if each["error"] is None)

    # Before anything is placed, for every prompt length that may come; the real one is known after the first answer.
    chosen = preview(256, tokens)
    instance = client.ask("POST", "/instance", {"placement": chosen["placement"]})
    path = f"/instance/{instance['instance_id']}"
    wait_until(lambda: client.ask("GET", path)["state"] == "ready", READY_SECONDS, "the instance is ready")
    client.stream(1, 8)  # what starts lazily
    measured = [client.stream(words, tokens) for _ in range(runs)]
    told = client.ask("GET", "/topology")["nodes"].values()
    load = max(node["load"] for node in told if node["name"] in layers)
    client.ask("DELETE", path)
    wait_until(lambda: not client.ask("GET", "/instance")["instances"], 30, "nothing is placed")
    prompt, output = measured[0].prompt_tokens, measured[0].output_tokens
    told = preview(prompt, output)["prediction"]
    return Case(
        name,
        len(layers),
        round(load, 2),
        told["is_measured"],
        told["ttft_seconds"],
        statistics.median(run.ttft_seconds for run in measured),
        told["tokens_per_second_alone"],
        statistics.median(1 / run.tpot_seconds for run in measured),
    )


def split(names: Sequence[str], layers: int = 30) -> dict[str, int]:
    """SmolLM2-135M has 30 layers."""
    return {name: layers // len(names) + (index < layers % len(names)) for index, name in enumerate(names)}


def on_loopback(store: Path, runs: int, words: int, tokens: int) -> Iterator[Case]:
    names = ("alpha", "beta", "gamma")
    with tempfile.TemporaryDirectory() as homes, room(Path(homes), store, names, "--memory", "700MiB") as here:
        client = Client(here.url("alpha"))
        wait_until(lambda: all_measured(client, len(names)), MEASURED_SECONDS, "machines and links are measured")
        for count in (1, 2, 3):
            yield case("loopback", client, split(names[:count]), runs, words, tokens)


def on_a_cable(store: Path, rate: str, runs: int, words: int, tokens: int) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as homes, cable(rate) as namespaces:
        environment = {**os.environ, JOIN_CODE_VARIABLE: new_join_code().reveal()}
        one, other = namespaces
        with machine(one, Path(homes), store, environment) as url, machine(other, Path(homes), store, environment):
            client = Client(url, ("ip", "netns", "exec", one))
            wait_until(lambda: all_measured(client, 2), MEASURED_SECONDS, "machines and link are measured")
            name = f"cable, {rate}" if rate else "cable"
            yield case(name, client, split(namespaces), runs, words, tokens)


@contextmanager
def cable(rate: str) -> Iterator[tuple[str, str]]:
    """Two namespaces and a veth pair, each end held to `rate` if there is one."""
    tag = uuid.uuid4().hex[:6]
    names = (f"mp-{tag}-a", f"mp-{tag}-b")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", f"w{tag}a", "type", "veth", "peer", "name", f"w{tag}b")
        for index, (name, end) in enumerate(zip(names, (f"w{tag}a", f"w{tag}b"), strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"10.78.0.{index + 1}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            if rate:
                shape = [
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    end,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "32kb",
                    "latency",
                    "2s",
                ]
                subprocess.run(["ip", "netns", "exec", name, *shape], check=True, capture_output=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def machine(namespace: str, homes: Path, store: Path, environment: dict[str, str]) -> Iterator[str]:
    """An agent in a namespace; yields its API's address."""
    home = homes / namespace
    home.mkdir()
    (home / "models").symlink_to(store)
    command = ["ip", "netns", "exec", namespace, sys.executable, "-m", "meshinfer.cli", "up", "--json"]
    command += ["--home", str(home), "--name", namespace, "--memory", "700MiB", "--api-port", "0"]
    with (home / "agent.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    with ending(process):
        yield json.loads(first_line(process))["api_url"]


def pulled(root: Path) -> Path:
    """A store with the model, described by this build: a card of an older one says too little."""
    store = ModelStore(root)
    info = store.info(ModelId(MODEL))
    if info is not None and not info.card.weight_kind:
        shutil.rmtree(root)
    pull(MODEL, ModelStore(root), lambda _: None)
    return root


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client_main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", nargs="*", default=["20mbit", "4mbit"], help="of the slowed cables, as tc has them")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--words", type=int, default=10, help="sentences of prompt, some 20 tokens each")
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    store = pulled(platformdirs.user_cache_path("meshinfer", appauthor=False) / "bench-assets" / "models")
    measure = (options.runs, options.words, options.tokens)

    print(__doc__.split("\n\n")[0], "\n")
    print(f"{'case':>16} {'stages':>6} {'load':>5} {'TTFT predicted':>15} {'measured':>9} {'error':>6} "
          f"{'tok/s predicted':>15} {'measured':>9} {'error':>6}", flush=True)  # fmt: skip
    cases: list[Case] = []
    sources = [on_loopback(store, *measure)]
    if os.geteuid() == 0 and shutil.which("tc"):
        sources += [on_a_cable(store, rate, *measure) for rate in ("", *options.rates)]
    for source in sources:
        for each in source:
            cases.append(each)
            print(
                f"{each.name:>16} {each.stages:>6} {each.load:>5.1f} {each.predicted_ttft:>13.2f} s "
                f"{each.measured_ttft:>7.2f} s {each.ttft_error:>+6.0%} {each.predicted_rate:>15.1f} "
                f"{each.measured_rate:>9.1f} {each.rate_error:>+6.0%}"
                + ("" if each.is_measured else "  (part of it assumed)"),
                flush=True,
            )
    errors = [abs(error) for each in cases for error in (each.ttft_error, each.rate_error)]
    told = {"median_error": statistics.median(errors), "worst_error": max(errors), "cases": [asdict(c) for c in cases]}
    print(f"\nmedian error {told['median_error']:.0%}, worst {told['worst_error']:.0%}\n")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
