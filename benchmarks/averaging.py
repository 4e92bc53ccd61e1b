"""Where a second node pays: losses of one node, DDP, local SGD and DiLoCo over steps, and what links make of them.

A loss over steps does not depend on the link. Each training is run once, in one process without a network: the step of
DDP on two nodes is that of one process with twice the batch, and nodes that average are replicas that train in turns,
whose rounds end in the class that the workers use (multinode/worker/levers/averaging.py). Times come in afterwards: a
step takes T, an exchange of all parameters C, and a method that exchanges every H steps takes T + C / H.

The model is a byte-level GPT, whose tokens are bytes; it has 10 M parameters unless `--shape` says otherwise. Its text
is the source of Python's standard library (PSF License); one file of 20 is held out. It trains with AdamW at a constant
rate after a warm-up, with gradients clipped at norm 1 and matrix products in bfloat16 (autocast). A base is this model
after a number of steps on one node with 4 x 128 tokens. LoRA trains adapters of rank 8 of a base on another text,
torch's own sources (BSD-3-Clause).

    nice -n 19 .venv/bin/python benchmarks/averaging.py STORE --part ratio
    nice -n 19 .venv/bin/python benchmarks/averaging.py STORE --part methods --bases 500 1500 --seeds 1 2
    nice -n 19 .venv/bin/python benchmarks/averaging.py STORE --part decay --bases 1500 --seeds 1 2
    nice -n 19 .venv/bin/python benchmarks/averaging.py STORE --part lora
    .venv/bin/python benchmarks/averaging.py STORE --part times --links 100mbit 1gbit
    .venv/bin/python benchmarks/averaging.py --report benchmarks/averaging.json

STORE is a directory. A training whose results it has is not run again, and an interrupted one resumes at its last
held-out loss. STORE/results.json has the results. `--bases`, `--batches`, `--rates` and `--steps` shorten a series, and
`--only average=local` takes trainings whose names have a match of that expression. A store is of one shape.

- `ratio`: r = steps of one node / steps of DDP to the same loss, over the batch and the base. A method pays only if its
  own r exceeds 1 + C / (H T).
- `methods`: every method from a base, at every rate; `--seeds` repeats with other seeds, each at its best rate: one
  node, DDP, the best local SGD and the best DiLoCo.
- `decay`: every method from a base, its rate decaying linearly to 0 as most trainings do, and one node over half as
  many and twice as many steps: r is of losses at the end. At a constant rate averaging also does what a decay does.
- `lora`: the same with adapters.
- `times`: seconds of a step and of an exchange at each link, as root, with a lab of two nodes of one core each up
  (`multinode lab up --nodes 2 --cores-per-node 1`) and nothing else on the machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from command import call
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from multinode.levers.averaging import Averaging, parse_average
from multinode.worker.levers.averaging import AveragingSettings, OuterOptimizer, fp16_scale

LENGTH, VOCABULARY = 128, 256
HELD_OUT_FILES = 20
NODES = 2
RATES = (1e-3, 3e-4, 3e-3, 1e-4)
BASES = (0, 500, 1500)
BASE_BATCH, BASE_RATE = 4, 1e-3
BATCHES = (4, 8, 16)
METHODS = ("local:16", "local:64", "diloco:64")
RATIO_STEPS, METHOD_STEPS = 400, 1200
# Of a rate that decays, a whole number of all rounds; one node also trains over these parts of it.
DECAY_STEPS, PARTS = 384, (0.5, 1.0, 2.0)
LORA_RANK, LORA_SCALE = 8, 2.0
EVERY, WARM_UP, HELD_OUT = 50, 50, 32
CLIP = 1.0
# C / T of the table: of an exchange of all parameters, in steps.
COSTS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_MOST_SEEDS = 16
# Of one node, between which its steps to a loss are interpolated.
_FEWEST_LENGTHS = 2
# Rounds of this length and number are measured for the time of an exchange.
_TIMED_EVERY, _TIMED_STEPS = 8, 40
SCHEMA = "multinode.benchmark.averaging/1"


class Shape(NamedTuple):
    """A GPT's size, and whether it multiplies in bfloat16, which takes less than half the time on cores with AMX."""

    width: int = 320
    layers: int = 8
    heads: int = 5
    bf16: bool = True


class Training(NamedTuple):
    """One loss curve.

    Attributes:
        batch: samples of a step on one node, in one process; of DDP on two nodes, of both together.
        average: `--average`, where two nodes average; each of them has `batch` samples. None is one process.
        lora: whether adapters are trained, on another text.
        decays: whether its rate decays linearly to 0 at the last step; otherwise it is constant. Both begin with a
            warm-up.
    """

    base: int
    batch: int
    rate: float
    average: str | None = None
    seed: int = 0
    lora: bool = False
    steps: int = RATIO_STEPS
    decays: bool = False

    @property
    def key(self) -> str:
        """Its name. At a constant rate, a longer training begins as a shorter one, and has the same name."""
        usual = f"base={self.base} batch={self.batch} rate={self.rate:g} average={self.average} seed={self.seed}"
        usual = f"{usual} decay={self.steps}" if self.decays else usual
        return f"lora {usual}" if self.lora else usual

    def rate_at(self, number: int) -> float:
        """The learning rate of the step of this number, which begins at 1."""
        left = min(1.0, (self.steps - number + 1) / (self.steps - WARM_UP)) if self.decays else 1.0
        return self.rate * min(1.0, number / WARM_UP) * left


class Block(torch.nn.Module):  # type: ignore[misc]
    """A layer of the transformer: attention and MLP, each after its norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self._heads = shape.heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(shape.width) for _ in range(2))
        self.mixed = torch.nn.Linear(shape.width, 3 * shape.width)
        self.attended = torch.nn.Linear(shape.width, shape.width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(shape.width, 4 * shape.width),
            torch.nn.GELU(),
            torch.nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """From and to (samples, tokens, width)."""
        samples, tokens, width = inputs.shape
        mixed = self.mixed(self.norms[0](inputs)).view(samples, tokens, 3, self._heads, width // self._heads)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        # Backward of torch's fused attention takes longer on a CPU than these products.
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        scores = (query @ key.transpose(2, 3) / math.sqrt(query.shape[-1])).masked_fill(later, -math.inf)
        found = functional.softmax(scores, -1).to(value.dtype) @ value
        hidden = inputs + self.attended(found.transpose(1, 2).reshape(samples, tokens, width))
        return hidden + torch.as_tensor(self.mlp(self.norms[1](hidden)))


class Gpt(torch.nn.Module):  # type: ignore[misc]
    """A decoder of bytes; its loss is the mean cross entropy of the next byte."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self._bf16 = shape.bf16
        torch.manual_seed(seed)
        self.tokens = torch.nn.Embedding(VOCABULARY, shape.width)
        self.places = torch.nn.Embedding(LENGTH, shape.width)
        self.blocks = torch.nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = torch.nn.LayerNorm(shape.width)
        self.head = torch.nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, each in self.named_parameters():
            if each.dim() > 1:
                torch.nn.init.normal_(each, std=0.02 / math.sqrt(2 * shape.layers) if "attended" in name else 0.02)

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        """The loss of windows of LENGTH + 1 bytes, one a row."""
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            hidden = self.tokens(inputs) + self.places(torch.arange(inputs.shape[1]))
            for block in self.blocks:
                hidden = block(hidden)
            scores = self.head(self.norm(hidden)).float()
        return functional.cross_entropy(scores.reshape(-1, VOCABULARY), targets.reshape(-1))


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """A linear layer under LoRA (arXiv:2106.09685), which begins as the layer itself."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = torch.nn.Linear(layer.in_features, LORA_RANK, bias=False)
        self.up = torch.nn.Linear(LORA_RANK, layer.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The layer, and what the adapter adds."""
        return torch.as_tensor(self.layer(inputs) + LORA_SCALE * self.up(self.down(inputs)))


def adapt(model: Gpt) -> None:
    """Freeze a model, and give each linear layer of its blocks an adapter."""
    model.requires_grad_(requires_grad=False)
    for block in model.blocks:
        block.mixed, block.attended = Adapted(block.mixed), Adapted(block.attended)
        block.mlp[0], block.mlp[2] = Adapted(block.mlp[0]), Adapted(block.mlp[2])


class Text(NamedTuple):
    """Bytes to train on, and held out."""

    train: torch.Tensor
    held_out: torch.Tensor

    def windows(self, count: int, *key: int) -> torch.Tensor:
        """Random windows of the text, equal for equal keys."""
        # Python's hash of integers is the same in every process.
        generator = torch.Generator().manual_seed(hash(key) % (1 << 62))
        begins = torch.randint(len(self.train) - LENGTH - 1, (count,), generator=generator)
        return torch.stack([self.train[begin : begin + LENGTH + 1] for begin in begins.tolist()]).long()

    @property
    def evaluated(self) -> torch.Tensor:
        """Windows of the text that is held out, evenly spread."""
        begins = [len(self.held_out) * each // HELD_OUT for each in range(HELD_OUT)]
        return torch.stack([self.held_out[begin : begin + LENGTH + 1] for begin in begins]).long()


def standard_library() -> Text:
    """The text of the base."""
    return read_text(standard_library_root())


def standard_library_root() -> Path:
    """The directory of Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(root: Path) -> list[Path]:
    """The Python sources below a directory, without tests and installed packages."""
    others = {"site-packages", "test", "tests", "idlelib"}
    return [path for path in sorted(root.rglob("*.py")) if not others & set(path.relative_to(root).parts)]


def read_text(root: Path) -> Text:
    """Bytes of the Python sources below a directory."""
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, path in enumerate(python_files(root)):
        parts[(number + 1) % HELD_OUT_FILES == 0].append(path.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return Text(train, held_out)


class Node:
    """A node of a training: its model and optimizer, and which samples it gets."""

    def __init__(self, shape: Shape, training: Training, rank: int, weights: dict[str, Any] | None = None) -> None:
        self.model = Gpt(shape, training.seed)
        if weights is not None:
            self.model.load_state_dict(weights)
        if training.lora:
            torch.manual_seed(training.seed)
            adapt(self.model)
        self.optimizer = torch.optim.AdamW(self._trained, lr=training.rate, weight_decay=0.01, fused=True)
        self._training, self._rank = training, rank

    @property
    def _trained(self) -> list[torch.Tensor]:
        return [each for each in self.model.parameters() if each.requires_grad]

    def step(self, text: Text, number: int) -> None:
        """The optimizer's step of this number, which begins at 1."""
        training = self._training
        for group in self.optimizer.param_groups:
            group["lr"] = training.rate_at(number)
        self.optimizer.zero_grad()
        loss = self.model(text.windows(training.batch, training.seed, self._rank, number))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, CLIP)
        self.optimizer.step()

    @property
    def flat(self) -> torch.Tensor:
        """The parameters that it trains, in one dimension."""
        return torch.nn.utils.parameters_to_vector(self._trained).detach().clone()

    def take(self, flat: torch.Tensor) -> None:
        """Set these parameters."""
        torch.nn.utils.vector_to_parameters(flat.clone(), self._trained)


class Simulation:
    """A training's nodes in one process; they train in turns, and are equal after each round.

    Their outer optimizers are equal, too, so there is one.
    """

    def __init__(self, training: Training, shape: Shape, weights: dict[str, Any] | None = None) -> None:
        averaging = parse_average(training.average) if training.average is not None else None
        ranks = range(NODES if averaging is not None else 1)
        self.nodes = [Node(shape, training, rank, weights) for rank in ranks]
        self._settings: AveragingSettings | None = None
        if averaging is not None:
            fields = msgspec.structs.asdict(averaging)
            self._settings = AveragingSettings(**fields, workers=(1,) * NODES)
        self._outer: OuterOptimizer | None = None

    def step(self, text: Text, number: int) -> bool:
        """The step of this number, which begins at 1; whether all nodes are equal after it."""
        if self._settings is not None and self._outer is None:
            self._outer = OuterOptimizer(self._settings, self.nodes[0].flat)
        for node in self.nodes:
            node.step(text, number)
        if self._settings is None or self._outer is None:
            return True
        if number % self._settings.every:
            return False
        changes = [self._outer.change(node.flat) for node in self.nodes]
        largest = torch.stack([change.abs().max() for change in changes]).max()
        scale = fp16_scale(largest) if self._outer.needs_scale else None
        parts = zip(changes, self._settings.shares, strict=True)
        first, *others = [self._outer.pack(change, share, scale) for change, share in parts]
        new = self._outer.step(self._outer.unpack(sum(others, start=first), changes[0], scale))
        for node in self.nodes:
            node.take(new)
        return True

    def state(self) -> dict[str, Any]:
        """All that a later process needs to go on."""
        nodes = [{"model": node.model.state_dict(), "optimizer": node.optimizer.state_dict()} for node in self.nodes]
        return {"nodes": nodes, "outer": self._outer.state() if self._outer is not None else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of `state`."""
        for node, stored in zip(self.nodes, state["nodes"], strict=True):
            node.model.load_state_dict(stored["model"])
            node.optimizer.load_state_dict(stored["optimizer"])
        if self._settings is not None:
            self._outer = OuterOptimizer(self._settings, self.nodes[0].flat)
            self._outer.load_state(state["outer"], "cpu")


class Results(NamedTuple):
    """What was trained and measured."""

    curves: dict[str, list[list[float]]]  # of each training by its key: pairs of steps and held-out loss
    times: dict[str, dict[str, float]]  # of each link: `step_s` of one node and `exchange_s`
    shape: Shape


class Store:
    """Results, bases, and the state of a training that has not ended, in a directory."""

    def __init__(self, folder: Path, shape: Shape = Shape()) -> None:  # noqa: B008
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._file = folder / "results.json"
        self.results = read_results(self._file) if self._file.exists() else Results({}, {}, shape)

    def keep(self) -> None:
        """Write the results."""
        _replace(self._file, lambda path: path.write_text(results_text(self.results)))

    def save_base(self, steps: int, weights: dict[str, Any]) -> None:
        """Store the parameters of a base."""
        _replace(self.base(steps), lambda path: torch.save(weights, path))

    def base(self, steps: int) -> Path:
        """The file of a base's parameters."""
        return self._folder / f"base-{steps}.pt"

    @property
    def _open(self) -> Path:
        return self._folder / "open.pt"

    def save_open(self, key: str, state: dict[str, Any]) -> None:
        """Store how far a training is."""
        _replace(self._open, lambda path: torch.save({"key": key, **state}, path))

    def load_open(self, key: str) -> dict[str, Any] | None:
        """The stored state of this training."""
        if not self._open.exists():
            return None
        state: dict[str, Any] = torch.load(self._open, weights_only=True)
        return state if state["key"] == key else None


def _replace(path: Path, write: Any) -> None:
    beside = path.with_name(path.name + ".new")
    write(beside)
    beside.replace(path)


def read_results(path: Path) -> Results:
    """The results of a file."""
    document = json.loads(path.read_text())
    return Results(document["curves"], document["times"], Shape(**document["shape"]))


def results_text(results: Results) -> str:
    """The file of results: a line for each curve."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(curve)}" for key, curve in sorted(results.curves.items()))
    shape, times = json.dumps(results.shape._asdict()), json.dumps(results.times)
    return f'{{"schema": "{SCHEMA}", "shape": {shape}, "times": {times}, "curves": {{\n{lines}\n}}}}\n'


def train(training: Training, text: Text, store: Store) -> list[list[float]]:
    """Train, or go on with what is stored; pairs of steps and held-out loss, from step 0.

    Nodes that average are evaluated at the end of the round that is next, since their models are equal there.
    """
    weights = torch.load(store.base(training.base), weights_only=True) if training.base else None
    simulation, done = Simulation(training, store.results.shape, weights), 0
    nodes = simulation.nodes
    curve = [[0, evaluate(nodes[0], text)]]
    stored = store.load_open(training.key)
    if stored is not None:
        curve, done = stored["curve"][:1], stored["done"]
        # A shorter training was measured at its end, too.
        curve += [point for last, point in itertools.pairwise(stored["curve"]) if point[0] // EVERY > last[0] // EVERY]
        simulation.load_state(stored["state"])
    for number in range(done + 1, training.steps + 1):
        is_due = number // EVERY > curve[-1][0] // EVERY or number == training.steps
        if simulation.step(text, number) and is_due:
            curve.append([number, evaluate(nodes[0], text)])
            sys.stderr.write(f"{training.key}: {number} {curve[-1][1]:.4f}\n")
            store.save_open(training.key, {"curve": curve, "done": number, "state": simulation.state()})
        if training == BASE and number in BASES:
            store.save_base(number, nodes[0].model.state_dict())
    return curve


BASE = Training(base=0, batch=BASE_BATCH, rate=BASE_RATE, seed=1, steps=max(BASES))


def evaluate(node: Node, text: Text) -> float:
    """The held-out loss in nats per byte."""
    with torch.no_grad():
        return round(float(node.model(text.evaluated)), 5)


def method_trainings(base: int) -> dict[str, Training]:
    """Every method from a base, by its name; at the first rate."""
    one = Training(base=base, batch=BASE_BATCH, rate=RATES[0], steps=METHOD_STEPS)
    averages = {name: one._replace(average=name) for name in METHODS}
    return {"one node": one, "DDP": one._replace(batch=NODES * BASE_BATCH), **averages}


def decay_trainings(base: int, steps: int = DECAY_STEPS) -> Iterator[Training]:
    """Those of one node, then every other method from a base, at the first rate."""
    one, *others = (each._replace(steps=steps, decays=True) for each in method_trainings(base).values())
    yield from (one._replace(steps=round(part * steps)) for part in PARTS)
    yield from others


def main() -> None:
    """Train what is missing, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", nargs="?", type=Path, metavar="STORE")
    parser.add_argument("--part", choices=("ratio", "methods", "decay", "lora", "times"), default="ratio")
    parser.add_argument("--bases", type=int, nargs="*", choices=BASES, default=BASES, help="steps of the bases")
    parser.add_argument("--batches", type=int, nargs="*", choices=BATCHES, default=BATCHES, help="batches, for `ratio`")
    parser.add_argument("--rates", type=float, nargs="*", choices=RATES, default=RATES, help="learning rates")
    parser.add_argument("--shape", type=int, nargs=3, default=Shape()[:3], metavar=("WIDTH", "LAYERS", "HEADS"))
    parser.add_argument("--steps", type=int, help="train for another number of steps, for `decay` whole rounds")
    parser.add_argument("--seeds", type=int, nargs="*", default=(), help="more seeds of the best methods")
    parser.add_argument("--only", default="", metavar="REGEX", help="take trainings whose names match")
    parser.add_argument("--links", nargs="*", default=("100mbit", "1gbit"), help="rates of the lab, for `times`")
    parser.add_argument("--worker", type=int, metavar="STEPS", help="train as a worker of `multinode launch`")
    parser.add_argument("--report", type=Path, metavar="FILE", help="print the tables of a file of curves")
    options = parser.parse_args()
    if options.report is not None:
        print(report(read_results(options.report)))
        return
    torch.set_num_threads(1)
    if options.worker is not None:
        work(options.worker, Shape(*options.shape))
        return
    store = Store(options.store, Shape(*options.shape))
    if options.part == "times":
        for link in options.links:
            store.results.times[link] = measure_times(link, store.results.shape)
            store.keep()
        return
    texts = {False: standard_library(), True: read_text(Path(torch.__file__).parent)}
    curves = store.results.curves
    for training in asked_trainings(curves, options):
        curve = curves.get(training.key, [[0, math.inf]])
        left = training.steps - curve[-1][0]
        if re.search(options.only, training.key) and left >= (1 if training.decays else _round_steps(training)):
            began = time.thread_time()
            curves[training.key] = train(training, texts[training.lora], store)
            store.keep()
            took_s = time.thread_time() - began
            sys.stderr.write(f"{training.key}: {took_s:.0f} s of a core, load {os.getloadavg()[0]}\n")


def work(steps: int, shape: Shape) -> None:
    """Train as one worker of `multinode launch`, with its averaging."""
    torch.distributed.init_process_group("gloo")
    node, text = Node(shape, method_trainings(0)["one node"], torch.distributed.get_rank()), standard_library()
    node.model = DistributedDataParallel(node.model)
    for number in range(1, steps + 1):
        node.step(text, number)
    torch.distributed.destroy_process_group()


def measure_times(link: str, shape: Shape) -> dict[str, float]:
    """Seconds of a step on one node, and of an exchange between the lab's two nodes at a rate."""
    call("lab", "rate", "all", link)
    worker = ("--", __file__, "--worker", str(_TIMED_STEPS), "--shape", *map(str, shape[:3]))
    usual = ("--hosts", "lab", "--workers-per-node", "1", "--no-check", "--json", "--env", "OMP_NUM_THREADS=1")
    summaries = []
    for options in (("--nodes", "1"), ("--nodes", "2", "--average", f"local:{_TIMED_EVERY}")):
        call("launch", *usual, *options, *worker)
        summaries.append(json.loads(call("show", "last", "--json"))["summary"])
    one, two = summaries
    return {
        "step_s": one["step_time_ms"]["median"]["value"] / 1000,
        "exchange_s": two["rounds"]["sync_ms"] / 1000,
    }


def asked_trainings(curves: dict[str, list[list[float]]], options: argparse.Namespace) -> Iterator[Training]:
    """The trainings of a part, in their order; those of other seeds depend on what the store has by then."""
    yield BASE
    if options.part == "ratio":
        for batch, base, rate in itertools.product(options.batches, options.bases, options.rates):
            one = Training(base=base, batch=batch, rate=rate, steps=options.steps or RATIO_STEPS)
            yield from (one, one._replace(batch=NODES * batch))
        return
    if options.part in {"decay", "lora"}:
        for base, seed, rate in itertools.product(options.bases, (0, *options.seeds), options.rates):
            given = {"seed": seed, "rate": rate, "lora": options.part == "lora"}
            yield from (each._replace(**given) for each in decay_trainings(base, options.steps or DECAY_STEPS))
        return
    for base in options.bases:
        methods = method_trainings(base).values()
        asked = [each._replace(steps=options.steps or METHOD_STEPS) for each in methods]
        yield from (training._replace(rate=rate) for rate in options.rates for training in asked)
        for seed in options.seeds:
            yield from (training._replace(seed=seed) for training in best_trainings(curves, asked))


def best_trainings(curves: dict[str, list[list[float]]], trainings: Sequence[Training]) -> Iterator[Training]:
    """Each at its best rate; of local SGD and DiLoCo only the one that ends at the lowest loss."""
    families: dict[str, list[tuple[float, Training]]] = {}
    for training in trainings:
        if (side := best(curves, training)) is not None:
            family = f"{training.batch} {(training.average or '').partition(':')[0]}"
            families.setdefault(family, []).append((_last_loss(side[1]), training._replace(rate=side[0])))
    yield from (min(found)[1] for found in families.values())


def _round_steps(training: Training) -> int:
    """Steps from one held-out loss to the next."""
    every = parse_average(training.average).every if training.average is not None else 1
    return math.ceil(EVERY / every) * every


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Steps until the held-out loss, mean of three in a row, is this low; None if it never is."""
    smooth = smoothed(curve)
    for (before, above), (after, below) in itertools.pairwise(smooth):
        if below <= loss < above:
            return before + (after - before) * (above - loss) / (above - below)
    return None


def smoothed(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """Steps and losses, each the mean of three neighbours."""
    threes = zip(curve, curve[1:], curve[2:], strict=False)
    return [tuple(map(statistics.fmean, zip(*three, strict=True))) for three in threes]  # type: ignore[misc]


def ratio(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> tuple[float, float, float] | None:
    """Steps of one node / steps of another training to the same loss: median and range.

    Over losses of one node that both reach, from half its steps to the lowest of these on; None if there is none.
    """
    lowest = max(_last_loss(each) for each in (one, other))
    last = steps_to(one, lowest)
    losses = [loss for steps, loss in smoothed(one) if last is not None and last / 2 <= steps < last]
    pairs = [(steps_to(one, loss), steps_to(other, loss)) for loss in (*losses, lowest)]
    found = [first / second for first, second in pairs if first and second]
    return (statistics.median(found), min(found), max(found)) if found else None


def best(curves: dict[str, list[list[float]]], training: Training) -> tuple[float, list[list[float]]] | None:
    """The rate at which this training ends at the lowest loss, among those that were trained, and its curve."""
    found = [(rate, curves[key]) for rate in RATES if (key := training._replace(rate=rate).key) in curves]
    return min(found, key=lambda each: _last_loss(each[1]), default=None)


def _last_loss(curve: Sequence[Sequence[float]]) -> float:
    return smoothed(curve)[-1][1]


def report(results: Results) -> str:
    """The tables in Markdown."""
    methods = (_method_lines(results, base) for base in BASES)
    others = (key for key in results.curves if "average=None" not in key)
    lengths = sorted({int(steps) for key in others for steps in re.findall(r"decay=(\d+)", key)})
    asked = itertools.product((False, True), BASES, lengths or [DECAY_STEPS])
    decayed = (_decay_lines(results, base, steps, lora=lora) for lora, base, steps in asked)
    tables = filter(None, map(list, (_ratio_lines(results.curves), *methods, *decayed)))
    return "\n\n".join("\n".join(lines) for lines in tables)


def _ratio_lines(curves: dict[str, list[list[float]]]) -> Iterator[str]:
    yield "| base (steps) | tokens per node and step | one node: rate, loss | DDP: rate, loss | r |"
    yield "|---" * 5 + "|"
    for base in BASES:
        for batch in BATCHES:
            one = best(curves, Training(base=base, batch=batch, rate=0.0))
            ddp = best(curves, Training(base=base, batch=NODES * batch, rate=0.0))
            if one is not None and ddp is not None:
                found = _ratio_words(ratio(one[1], ddp[1]))
                yield f"| {base} | {batch} x {LENGTH} | {_side_words(one)} | {_side_words(ddp)} | {found} |"


def _method_lines(results: Results, base: int) -> Iterator[str]:
    curves, costs = results.curves, _costs(results)
    methods = method_trainings(base)
    usual = methods.pop("one node")
    one, sides = best(curves, usual), {name: best(curves, training) for name, training in methods.items()}
    if one is None or not any(sides[name] for name in METHODS):
        return
    yield f"| constant rate, base {base} | rate, loss | r | {' | '.join(costs)} |"
    yield "|---" * (3 + len(costs)) + "|"
    yield f"| one node | {_side_words(one)} | 1 |{' 1 |' * len(costs)}"
    for name, training in methods.items():
        if (side := sides[name]) is not None:
            found = over_seeds(curves, usual._replace(rate=one[0]), training._replace(rate=side[0]))
            gains = _gains(found[0], training.average, costs) if found is not None else ["-" for _ in costs]
            yield f"| {name} | {_side_words(side)} | {_ratio_words(found)} | {' | '.join(gains)} |"


def _costs(results: Results, *, lora: bool = False) -> dict[str, float]:
    """C / T by the heading of a column."""
    costs = {f"C/T {cost:g}": cost for cost in COSTS}
    # An exchange of adapters is another one.
    for link, times in results.times.items() if not lora else ():
        cost = times["exchange_s"] / times["step_s"]
        costs[f"{link}: C/T {cost:.3g}"] = cost
    return costs


def _gains(found: float, average: str | None, costs: dict[str, float]) -> list[str]:
    """Time of one node over that of a method with this r, by the costs of an exchange."""
    averaging = parse_average(average) if average is not None else Averaging(every=1)
    sent = 0.5 if averaging.dtype is not None else 1.0
    return [f"{found / (1 + sent * cost / averaging.every):.2f}" for cost in costs.values()]


def _decay_lines(results: Results, base: int, steps: int, *, lora: bool) -> Iterator[str]:
    curves, costs = results.curves, _costs(results, lora=lora)
    ones: list[Training] = []
    others: list[Training] = []
    for each in decay_trainings(base, steps):
        is_one = each.average is None and each.batch == BASE_BATCH
        (ones if is_one else others).append(each._replace(lora=lora))
    reached = [(one.steps, last_losses(curves, one)) for one in ones]
    alone = [(steps, statistics.fmean(losses[1])) for steps, losses in reached if losses is not None]
    if len(alone) < _FEWEST_LENGTHS or not any(last_losses(curves, each) for each in others):
        return
    yield f"| decaying rate, {'LoRA, ' if lora else ''}base {base} | rate, loss | r | {' | '.join(costs)} |"
    yield "|---" * (3 + len(costs)) + "|"
    for one, (_, found) in zip(ones, reached, strict=True):
        if found is not None:
            yield f"| one node, {one.steps} steps | {found[0]:g}, {_loss_words(found[1])} | |{' |' * len(costs)}"
    for each, name in zip(others, list(method_trainings(base))[1:], strict=True):
        if (found := last_losses(curves, each)) is not None:
            ratios = [steps_alone(alone, loss) / each.steps for loss in found[1]]
            middle = statistics.median(ratios)
            gains = " | ".join(_gains(middle, each.average, costs))
            words = _ratio_words((middle, min(ratios), max(ratios)))
            yield f"| {name}, {each.steps} steps | {found[0]:g}, {_loss_words(found[1])} | {words} | {gains} |"


def last_losses(curves: dict[str, list[list[float]]], training: Training) -> tuple[float, list[float]] | None:
    """The best rate of a training whose rate decays, by the mean over its seeds, and its losses at the end."""
    found: dict[float, list[float]] = {}
    for rate, seed in itertools.product(RATES, range(_MOST_SEEDS)):
        curve = curves.get(training._replace(rate=rate, seed=seed).key)
        if curve is not None:
            found.setdefault(rate, []).append(curve[-1][1])
    return min(found.items(), key=lambda each: statistics.fmean(each[1]), default=None)


def steps_alone(alone: Sequence[tuple[int, float]], loss: float) -> float:
    """Steps after which one node has a loss at the end of its decay: log-linear between those that it was trained over.

    Beyond these, the nearest two are extended.
    """
    pairs = list(itertools.pairwise(alone))
    (before, above), (after, below) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
    return float(before * (after / before) ** ((above - loss) / (above - below)))


def _loss_words(losses: Sequence[float]) -> str:
    spread = f" ({min(losses):.3f}-{max(losses):.3f})" if len(losses) > 1 else ""
    return f"{statistics.fmean(losses):.3f}{spread}"


def over_seeds(
    curves: dict[str, list[list[float]]], one: Training, other: Training
) -> tuple[float, float, float] | None:
    """The ratio of two trainings over all seeds that both have: median of the medians, and range."""
    keys = [(one._replace(seed=seed).key, other._replace(seed=seed).key) for seed in range(_MOST_SEEDS)]
    found = [ratio(curves[first], curves[second]) for first, second in keys if first in curves and second in curves]
    if not found or None in found:
        return None
    medians, least, most = zip(*filter(None, found), strict=True)
    return statistics.median(medians), min(least), max(most)


def _side_words(side: tuple[float, list[list[float]]]) -> str:
    return f"{side[0]:g}, {_last_loss(side[1]):.3f}"


def _ratio_words(found: tuple[float, float, float] | None) -> str:
    return "not reached" if found is None else "{:.2f} ({:.2f}-{:.2f})".format(*found)


if __name__ == "__main__":
    main()
