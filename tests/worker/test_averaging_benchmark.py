"""The averaging of benchmarks/averaging.py in one process is that of two real workers; its trainings can be resumed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from .gloo_pair import run_pair
from .test_sync import BEGIN, farthest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
PREPARE = f"""
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "benchmarks")!r}]
import averaging as benchmark
shape = benchmark.Shape(width=16, layers=2, heads=2, bf16=False)
"""
COMPARED = """
from multinode.levers.averaging import parse_average

class Own(benchmark.Text):
    "What this worker trains on, where two of DDP share the samples of a step."
    def windows(self, count, seed, rank, number):
        return super().windows(2 * count, seed, 0, number)[RANK * count :][:count]

generator = torch.Generator().manual_seed(3)
data = torch.randint(60, (4000,), generator=generator).byte()
text = benchmark.Text(data, data)
told = {}
for average in (None, "local:3", "local:3:fp16", "local:3:bf16", "diloco:3", "diloco:3:0.5:0.8:fp16"):
    settings = {} if average is None else parse_average(average)
    lever(**({name: getattr(settings, name) for name in settings.__struct_fields__} if average else {}))
    training = benchmark.Training(base=0, batch=2, rate=0.05, average=average, seed=5)
    node = benchmark.Node(shape, training, RANK)
    # As of the step before any: what both begin with.
    begun = node.flat
    node.model = parallel.DistributedDataParallel(node.model)
    for number in range(1, 10):
        node.step(Own(data, data) if average is None else text, number)
    lever()
    simulated = benchmark.Simulation(training if average else training._replace(batch=4), shape)
    equal = [simulated.step(text, number) for number in range(1, 10)]
    told[str(average)] = {
        "trained": node.flat.tolist(), "simulated": simulated.nodes[0].flat.tolist(), "equal": equal,
        "moved": (node.flat - begun).abs().max().item(),
    }
tell(told)
"""
RESUMED = """
from pathlib import Path
torch.set_num_threads(1)
data = (torch.arange(9000) % 97).byte()
text = benchmark.Text(data, data)
told = {}
for average, lora in ((None, False), ("diloco:4:fp16", False), ("local:4", True)):
    training = benchmark.Training(base=0, batch=2, rate=0.01, average=average, lora=lora, steps=120)
    whole = benchmark.train(training, text, benchmark.Store(Path(FOLDER) / f"whole {average}", shape))
    store = benchmark.Store(Path(FOLDER) / f"resumed {average}", shape)
    benchmark.train(training._replace(steps=60), text, store)
    told[str(average)] = [whole, benchmark.train(training, text, store)]
tell(told)
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("averaging") / "compared"
    return [told.said for told in run_pair(folder, BEGIN + PREPARE + COMPARED)]


@pytest.mark.parametrize(
    "average", ["None", "local:3", "local:3:fp16", "local:3:bf16", "diloco:3", "diloco:3:0.5:0.8:fp16"]
)
def test_two_nodes_in_one_process_train_as_two_workers_over_gloo(compared: list[dict[str, Any]], average: str) -> None:
    for said in compared:
        found = said[average]
        assert farthest(found["trained"], found["simulated"]) < 1e-5 < found["moved"]
        assert found["equal"] == [average == "None" or number % 3 == 0 for number in range(1, 10)]


def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path: Path) -> None:
    (told,) = run_pair(tmp_path / "resumed", "import torch\n" + PREPARE + RESUMED, workers=1)
    for whole, resumed in told.said.values():
        assert resumed == whole
        assert whole[-1][1] < whole[0][1]
        assert [steps for steps, _ in whole][:3] in ([0, 50, 100], [0, 52, 100])


def test_a_rate_warms_up_and_may_decay() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    import averaging

    constant = averaging.Training(base=0, batch=2, rate=0.1, steps=120)
    for training, rates in (
        (constant, [0.002, 0.1, 0.1, 0.1]),
        (constant._replace(decays=True), [0.002, 0.1, 0.05, 0]),
    ):
        assert [round(training.rate_at(number), 2 if number > 100 else 4) for number in (1, 50, 86, 120)] == rates


def test_the_tables_have_steps_to_the_same_loss_and_what_an_exchange_leaves_of_them(tmp_path: Path) -> None:
    def curve(speed: float) -> list[list[float]]:
        return [[steps, 5.0 - 0.001 * speed * steps] for steps in range(0, 1201, 50)]

    def key(batch: int, average: str | None = None, rate: str = "0.001") -> str:
        return f"base=1500 batch={batch} rate={rate} average={average} seed=0"

    curves = {
        key(4): curve(1.0),
        key(8): curve(1.5),
        key(8, rate="0.003"): curve(1.2),
        key(4, "local:16"): curve(1.25),
        key(4, "local:64"): curve(0.25),
        key(4, "diloco:64"): curve(-1.0),
        key(4).replace("seed=0", "seed=2"): curve(1.0),
        key(4, "local:16").replace("seed=0", "seed=2"): curve(1.75),
    }
    # At the end of a decay: one node loses 0.1 with every doubling of its steps.
    ends = {key(4): {192: 2.1, 384: 2.0, 768: 1.9}, key(8): {384: 1.95}, key(4, "local:64"): {384: 2.2}}
    curves |= {
        f"lora {name} decay={steps}": [[0, 5.0], [steps, loss]]
        for name, losses in ends.items()
        for steps, loss in losses.items()
    }
    curves[f"lora {key(8).replace('seed=0', 'seed=1')} decay=384"] = [[0, 5.0], [384, 1.85]]
    times = {"1gbit": {"step_s": 0.25, "exchange_s": 1.0}}
    file = tmp_path / "results.json"
    sys.path.append(str(ROOT / "benchmarks"))
    import averaging

    file.write_text(averaging.results_text(averaging.Results(curves, times, averaging.Shape())))
    shown = averaging.report(averaging.read_results(file)).splitlines()
    costs = "C/T 0.1 | C/T 0.3 | C/T 1 | C/T 3 | C/T 10 | C/T 30"
    assert f"| constant rate, base 1500 | rate, loss | r | {costs} | 1gbit: C/T 4 |" in shown
    assert not [line for line in shown if "base 500" in line]
    # The best rate of each counts, and all seeds.
    assert "| 1500 | 4 x 128 | 0.001, 3.850 | 0.001, 3.275 | 1.50 (1.50-1.50) |" in shown
    assert "| DDP | 0.001, 3.275 | 1.50 (1.50-1.50) | 1.36 | 1.15 | 0.75 | 0.38 | 0.14 | 0.05 | 0.30 |" in shown
    assert "| local:16 | 0.001, 3.562 | 1.50 (1.25-1.75) | 1.49 | 1.47 | 1.41 | 1.26 | 0.92 | 0.52 | 1.20 |" in shown
    assert "| local:64 | 0.001, 4.712 | 0.25 (0.25-0.25) | 0.25 | 0.25 | 0.25 | 0.24 | 0.22 | 0.17 | 0.24 |" in shown
    assert "| diloco:64 | 0.001, 6.150 | not reached | - | - | - | - | - | - | - |" in shown
    assert shown[-7:] == [
        f"| decaying rate, LoRA, base 1500 | rate, loss | r | {costs} |",
        "|---|---|---|---|---|---|---|---|---|",
        "| one node, 192 steps | 0.001, 2.100 | | | | | | | |",
        "| one node, 384 steps | 0.001, 2.000 | | | | | | | |",
        "| one node, 768 steps | 0.001, 1.900 | | | | | | | |",
        "| DDP, 384 steps | 0.001, 1.900 (1.850-1.950) | 2.12 (1.41-2.83) | 1.93 | 1.63 | 1.06 | 0.53 | 0.19 | 0.07 |",
        "| local:64, 384 steps | 0.001, 2.200 | 0.25 (0.25-0.25) | 0.25 | 0.25 | 0.25 | 0.24 | 0.22 | 0.17 |",
    ]
