"""Prediction against reality: what previews say of the small real model, and what it then does, in the same run.

    python -m bench.prediction [--runs 3] [--only loopback cables]     (namespaces, taps and tc need root)

Real agents with real runners on this machine. Each case places the model as a person would who sets the layers
(`layers=node=n`), takes the prediction from the preview *before* anything is placed, and streams answers from the
OpenAI API:

    loopback   1, 2 and 3 stages: what computing and channels cost
    cables     three machines (network namespaces), a cable of its own between each two (`bench.wires`). The cable
               alpha–beta is plain or slow (`tc tbf`), alpha–gamma is long (a delay); 2 stages over each of them, and 3

TTFT is the time to the first streamed token of a prompt that no cache has seen; TPOT is the time from the first token
to the last over their number less one; medians, and the spread of the runs (largest less smallest, of the median).
Predicted and measured are of the same prompt and answer lengths. Speeds are what the probes said when the agents first
started, and what real runs made of them since, as in any mesh.

With each set of cables the planner is asked which of the two should hold the rest of alpha's layers, and its choice is
held against both measurements: it should leave the slow cable where the other way is quicker, and stay where it is not.
And it is asked where it would put the model if nobody said anything: what nodes it declines, and with which numbers.

What the model cannot know is what else this machine does meanwhile: its load stands beside each case (one-minute
average at the case's end; one runner at work and the client make 1.0 to 1.3 by themselves).

Last line: the result as JSON.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import platformdirs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "e2e"))

from mesh import MODEL, room

from bench.wires import Cable, machines
from meshinfer.base.ids import ModelId
from meshinfer.models.pull import pull
from meshinfer.models.store import ModelStore
from meshinfer.serving.text import TextModel
from meshinfer.testing import agent_process
from meshinfer.transport.mesh_key import JOIN_CODE_VARIABLE, new_join_code

ROOT = Path(__file__).resolve().parent.parent
WORDS = "The laptops in the room keep what they know of each other in small cards and measure the way between them. "
MEASURED_SECONDS = 240.0
"""For the machines to be probed (when idle) and the links (a burst each)."""
READY_SECONDS = 240.0
CONTEXT = 1024
NAMES = ("alpha", "beta", "gamma")
ONE, OTHER = ("alpha", "beta"), ("alpha", "gamma")
CABLES = (
    {ONE: Cable(rate="20mbit"), OTHER: Cable(delay_seconds=0.005)},
    {ONE: Cable(rate="4mbit"), OTHER: Cable(delay_seconds=0.005)},
    {ONE: Cable(rate="4mbit"), OTHER: Cable(delay_seconds=0.03)},
    {OTHER: Cable(delay_seconds=0.005)},
)
"""A chunk of this model is 0.5 MB: 0.2 s at 20 Mbit/s, 1 s at 4. A delay costs twice itself for each of 32 tokens: 0.3 s
for 5 ms, 1.9 s for 30 ms. So gamma is the better place for the rest with the second set of them only."""


@dataclass(frozen=True)
class Run:
    ttft_seconds: float
    tpot_seconds: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Case:
    name: str
    nodes: tuple[str, ...]
    """In pipeline order."""
    load: float
    is_measured: bool
    predicted_ttft: float
    measured_ttft: float
    ttft_spread: float
    predicted_rate: float
    measured_rate: float
    rate_spread: float
    output_tokens: int

    @property
    def ttft_error(self) -> float:
        return self.predicted_ttft / self.measured_ttft - 1

    @property
    def rate_error(self) -> float:
        return self.predicted_rate / self.measured_rate - 1

    @property
    def request_seconds(self) -> float:
        """Measured: of a whole answer."""
        return self.measured_ttft + (self.output_tokens - 1) / self.measured_rate


def spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


# --- the client, in a process of its own so that it can be in a namespace ---------------------------


def new_prompt(words: int) -> str:
    """That no cache has seen, of always as many tokens: a digit is one."""
    return f"{uuid.uuid4().int % 10**20:020d} " + WORDS * words


def stream(url: str, words: int, tokens: int) -> Run:
    """One streamed answer to a prompt that is new."""
    prompt = new_prompt(words)
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
        command = [*self._prefix, sys.executable, "-m", "bench.prediction", "--client", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=2 * READY_SECONDS, check=False)
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


@dataclass(frozen=True)
class Measure:
    """What is asked for in each case."""

    runs: int
    words: int
    prompt_tokens: int
    output_tokens: int


def wait_probed(client: Client, name: str) -> None:
    """Until it knows its own speed. Agents start one after the other: laptops do not share caches, these machines do."""

    def is_probed() -> bool:
        nodes = client.ask("GET", "/topology")["nodes"].values()
        return any(node["name"] == name and node["speeds"] for node in nodes)

    wait_until(is_probed, MEASURED_SECONDS, f"{name} has measured itself")


def preview(client: Client, layers: dict[str, int], measure: Measure) -> Any:
    """What the planner says of this model, with these layers where they are."""
    wish = {"model_id": MODEL, "context": CONTEXT, "concurrency": 1, "layers": [f"{n}={k}" for n, k in layers.items()]}
    lengths = {"prompt_tokens": measure.prompt_tokens, "output_tokens": measure.output_tokens}
    return client.ask("GET", "/instance/previews", **lengths, **wish)


def chosen(told: Any) -> Any:
    for each in told["previews"]:
        if each["error"] is None:
            return each
    raise RuntimeError(f"nothing can be placed: {[each['error'] for each in told['previews']][:2]}")


def is_free(client: Client) -> bool:
    nodes = client.ask("GET", "/topology")["nodes"].values()
    return (
        all(node["memory_free_bytes"] == node["memory_bytes"] for node in nodes)
        and not (client.ask("GET", "/instance")["instances"])
    )


def case(name: str, client: Client, layers: dict[str, int], measure: Measure) -> Case:
    """Place with these layers, predict, run, take it away again."""
    best = chosen(preview(client, layers, measure))
    told = best["prediction"]
    names = {node_id: node["name"] for node_id, node in client.ask("GET", "/topology")["nodes"].items()}
    instance = client.ask("POST", "/instance", {"placement": best["placement"]})
    path = f"/instance/{instance['instance_id']}"
    wait_until(lambda: client.ask("GET", path)["state"] == "ready", READY_SECONDS, "the instance is ready")
    client.stream(1, 8)  # what starts lazily
    runs = [client.stream(measure.words, measure.output_tokens) for _ in range(measure.runs)]
    load = os.getloadavg()[0]
    client.ask("DELETE", path)
    wait_until(lambda: is_free(client), 60, "nothing is placed, and no memory promised")
    for run in runs:
        if (run.prompt_tokens, run.output_tokens) != (measure.prompt_tokens, measure.output_tokens):
            print(f"  not as predicted for: {run}", flush=True)
    ttfts, rates = [run.ttft_seconds for run in runs], [1 / run.tpot_seconds for run in runs]
    return Case(
        name=name,
        nodes=tuple(names[seat["node_id"]] for seat in best["placement"]["seats"]),
        load=round(load, 2),
        is_measured=told["is_measured"],
        predicted_ttft=told["ttft_seconds"],
        measured_ttft=statistics.median(ttfts),
        ttft_spread=spread(ttfts),
        predicted_rate=told["tokens_per_second_alone"],
        measured_rate=statistics.median(rates),
        rate_spread=spread(rates),
        output_tokens=measure.output_tokens,
    )


def split(names: Sequence[str], layers: int = 30) -> dict[str, int]:
    """SmolLM2-135M has 30 layers."""
    return {name: layers // len(names) + (index < layers % len(names)) for index, name in enumerate(names)}


def on_loopback(store: Path, measure: Measure) -> Iterator[Case]:
    with tempfile.TemporaryDirectory() as homes, room(Path(homes), store, NAMES[:1], "--memory", "700MiB") as here:
        for name in NAMES:
            if name not in here.agents:
                here.start(name)
            wait_probed(Client(here.url(name)), name)
        client = Client(here.url(NAMES[0]))
        wait_until(lambda: all_measured(client, len(NAMES)), MEASURED_SECONDS, "machines and links are measured")
        told = preview(client, {}, measure)
        print(f"  asked for nothing in particular: {chosen(told)['reason']}")
        for declined in told["declined"]:
            print(f"  declined: {declined['explanation']}", flush=True)
        for count in (1, 2, 3):
            yield case("loopback", client, split(NAMES[:count]), measure)


def on_cables(
    store: Path, homes: Path, join_code: str, cables: dict[tuple[str, str], Cable], measure: Measure
) -> Iterator[Case]:
    """The same homes with each set of cables: what the machines know of themselves stays, of their links nothing does."""
    environment = {**os.environ, JOIN_CODE_VARIABLE: join_code}
    with ExitStack() as stack:
        spaces = stack.enter_context(machines(NAMES, cables))
        clients: dict[str, Client] = {}
        for name, space in spaces.items():
            url = stack.enter_context(machine(name, space, homes, store, environment))
            clients[name] = Client(url, ("ip", "netns", "exec", space))
            wait_probed(clients[name], name)
        client = clients["alpha"]
        wait_until(lambda: all_measured(client, 3), MEASURED_SECONDS, "machines and links are measured")
        yield from with_these_cables(cables, client, measure)


def with_these_cables(cables: dict[tuple[str, str], Cable], client: Client, measure: Measure) -> Iterator[Case]:
    one, other = (str(cables.get(pair, Cable())) for pair in (ONE, OTHER))
    half = split(ONE)["alpha"]
    # Of two nodes: a third one changes a whole answer by less than what equal machines measure of each other differs by.
    previews = preview(client, {"alpha": half}, measure)["previews"]
    best = next(each for each in previews if each["error"] is None and len(each["placement"]["seats"]) == 2)
    names = {node_id: node["name"] for node_id, node in client.ask("GET", "/topology")["nodes"].items()}
    picked = {names[seat["node_id"]] for seat in best["placement"]["seats"]}
    by_nodes: dict[frozenset[str], Case] = {}
    for title, nodes in ((one, ONE), (other, OTHER), (f"{one}; {other}", NAMES)):
        by_nodes[frozenset(nodes)] = told = case(title, client, split(nodes), measure)
        yield told
    seconds = {", ".join(sorted(nodes)): round(told.request_seconds, 2) for nodes, told in by_nodes.items()}
    quickest = min(by_nodes, key=lambda nodes: by_nodes[nodes].request_seconds)
    lost = by_nodes[frozenset(picked)].request_seconds / by_nodes[quickest].request_seconds - 1
    print(f"  alpha–beta {one}, alpha–gamma {other}; alpha has half, the rest goes to: {sorted(picked - {'alpha'})}")
    print(f"  ({best['reason']})")
    print(f"  a whole answer took {seconds} s, so the choice loses {lost:.0%}", flush=True)


@contextmanager
def machine(name: str, space: str, homes: Path, store: Path, environment: dict[str, str]) -> Generator[str]:
    """An agent in a namespace; yields its API's address."""
    home = homes / name
    home.mkdir(exist_ok=True)
    if not (home / "models").exists():
        (home / "models").symlink_to(store)
    prefix = ("ip", "netns", "exec", space)
    running = agent_process.start(home, "--name", name, "--memory", "700MiB", prefix=prefix, environment=environment)
    with agent_process.ending(running.process):
        yield running.url


def pulled(root: Path) -> Path:
    """A store with the model, described by this build: a card of an older one says too little."""
    store = ModelStore(root)
    info = store.info(ModelId(MODEL))
    if info is not None and not info.card.weight_kind:
        shutil.rmtree(root)
    pull(MODEL, ModelStore(root), lambda _: None)
    return root


def row(case: Case) -> str:
    """Of the table."""
    return (
        f"| {case.name} | {len(case.nodes)}: {', '.join(case.nodes)} | {case.load:.1f} "
        f"| {case.predicted_ttft:.2f} s | {case.measured_ttft:.2f} s ({case.ttft_spread:.0%}) "
        f"| {case.ttft_error:+.0%} | {case.predicted_rate:.2f} | {case.measured_rate:.2f} ({case.rate_spread:.0%}) "
        f"| {case.rate_error:+.0%} |" + ("" if case.is_measured else " partly assumed")
    )


def prompt_tokens(store: Path, words: int) -> int:
    """As the API will count them."""
    return len(TextModel.load(store / MODEL).render_chat([{"role": "user", "content": new_prompt(words)}]))


def main() -> None:
    if sys.argv[1:2] == ["--client"]:
        client_main(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=["loopback", "cables"], choices=["loopback", "cables"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--words", type=int, default=10, help="sentences of prompt, some 20 tokens each")
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    store = pulled(platformdirs.user_cache_path("meshinfer", appauthor=False) / "bench-assets" / "models")
    measure = Measure(options.runs, options.words, prompt_tokens(store, options.words), options.tokens)

    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("meshinfer", "mlx", "mlx-lm"))
    print((__doc__ or "").split("\n\n")[0], "\n")
    print(f"{platform.machine()}, {os.cpu_count()} cores; Python {platform.python_version()}, {versions}; {MODEL}, "
          f"{measure.prompt_tokens} tokens of prompt, {measure.output_tokens} of answer, {measure.runs} runs\n")  # fmt: skip
    print("| cables | stages | load | TTFT predicted | measured (spread) | error | tokens/s predicted | measured (spread) "
          "| error |\n|---|---|---|---|---|---|---|---|---|", flush=True)  # fmt: skip
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as homes:
        sources = [on_loopback(store, measure)] if "loopback" in options.only else []
        if "cables" in options.only and os.geteuid() == 0 and shutil.which("tc"):
            code = new_join_code().reveal()
            sources += [on_cables(store, Path(homes), code, cables, measure) for cables in CABLES]
        for source in sources:
            try:
                for each in source:
                    cases.append(each)
                    print(row(each), flush=True)
            except RuntimeError as error:  # the rest is worth knowing all the same
                print(f"  ended early: {error}", flush=True)
    if not cases:
        sys.exit("no case came to its end")
    errors = {
        "TTFT": [abs(each.ttft_error) for each in cases],
        "tokens/s": [abs(each.rate_error) for each in cases],
    }
    errors["both"] = errors["TTFT"] + errors["tokens/s"]
    told = {name: {"median": statistics.median(values), "worst": max(values)} for name, values in errors.items()}
    print(
        "\n" + "; ".join(f"{n}: median error {t['median']:.1%}, worst {t['worst']:.0%}" for n, t in told.items()) + "\n"
    )
    print(json.dumps({"errors": told, "cases": [asdict(c) for c in cases]}))


if __name__ == "__main__":
    main()
