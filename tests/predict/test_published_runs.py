"""The cost model against figures that others have published; each case names its source."""

from __future__ import annotations

import pytest

from multinode.model.model_size import lora_parameters, parse_model
from multinode.predict.break_even import accumulation_for, link_for
from multinode.predict.calibration import Calibration
from multinode.predict.cost_model import Scenario, StepCosts, StepParts, step_parts
from multinode.predict.network_model import CommTimes, Link, NetworkModel
from multinode.predict.prediction import Prediction
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work, fit_curve, nic_bytes, strategy_calls

# Qwen2-VL-7B's language model, by its published config.json.
QWEN2_VL = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
}
TARGETS = ("k_proj", "up_proj", "o_proj", "v_proj", "q_proj", "gate_proj", "down_proj", "embed_tokens")
# 100 MB/s of payload.
ORDINARY = Link(gbit_per_s=0.8 * 1538 / 1448)
# Of the run on two nodes: its runtime times its steps per second.
STEPS = 26341.9 * 0.839
TWO_BY_TWO = Layout(nodes=2, workers_per_node=2)


def test_two_boxes_of_two_are_slower_than_one_of_four_by_what_zero_2_sends() -> None:
    """LLaMA-Factory on two boxes of RTX 4090: 2 hours with 4 GPUs of one, 7.3 hours with 2 of each."""
    shape = parse_model(QWEN2_VL)
    assert shape is not None
    trainable = lora_parameters(shape, 8, TARGETS)
    assert trainable == 21_430_272
    load = TrafficInputs(parameters=None, trainable=trainable, parameter_bytes=2, gradient_bytes=2)
    # (2 G + Psi_trainable) (n - 1) / n: 128.6 MB, of which three quarters pass each NIC of a flat ring of four.
    assert nic_bytes(strategy_calls(Strategy.ZERO2, load, TWO_BY_TWO), TWO_BY_TWO) == pytest.approx(96.4e6, rel=1e-3)
    calibration = Calibration(
        # Two hours; what its four workers exchanged among themselves is part of it, and not known apart.
        costs=StepCosts(compute_ms=2.0 * 3600e3 / STEPS),
        layout=Layout(nodes=1, workers_per_node=4),
        per_device_batch=1,
        work=Work(strategy=Strategy.ZERO2, load=load),
        network=NetworkModel(link=ORDINARY, layout=TWO_BY_TWO),
    )
    # LLaMA-Factory's example for ZeRO-2 sets overlap_comm: false.
    scenario = Scenario(link=ORDINARY, layout=TWO_BY_TWO, per_device_batch=1, strategy=Strategy.ZERO2, overlap=False)
    found = Prediction(calibration, scenario)
    assert found.parts.compute_ms == pytest.approx(326, abs=1)
    assert found.parts.exposed_ms == pytest.approx(964, abs=1)
    assert found.step_time_ms == pytest.approx(1000 / 0.839, rel=0.10)
    assert STEPS * found.step_time_ms / 3600e3 == pytest.approx(7.32, rel=0.10)
    low, high = found.interval
    assert low < 3.356 < high
    assert found.bottleneck.kind == "network"
    assert accumulation_for(calibration, scenario, target=0.9).code == "micro_batches"
    # What would have made it worth while: 25 Gbit/s loses less than a tenth.
    link = link_for(calibration, scenario, lambda faster, _: faster.step_time_ms < 1.1 * found.parts.compute_ms)
    assert link.value is not None
    assert 10 < link.value < 40


@pytest.mark.parametrize(
    ("k1", "k4"),
    [((0.57, 0.38, 0.05), (0.84, 0.14, 0.02)), ((0.82, 0.10, 0.07), (0.95, 0.03, 0.02))],
    ids=["pcie", "nvlink"],
)
def test_accumulation_shrinks_the_share_of_communication_as_published(
    k1: tuple[float, float, float], k4: tuple[float, float, float]
) -> None:
    """GPT-2 medium on two RTX 3090 Ti (mli/transformers-benchmarks): shares of computing, communication, optimizer."""
    compute, comm, optimizer = k1
    costs = StepCosts(compute_ms=compute, optimizer_ms=optimizer)
    assert shares(step_parts(costs, CommTimes(step_ms=comm), accumulation=1)) == pytest.approx(k1, abs=0.01)
    assert shares(step_parts(costs, CommTimes(step_ms=comm), accumulation=4)) == pytest.approx(k4, abs=0.01)


def shares(parts: StepParts) -> tuple[float, float, float]:
    return tuple(part / parts.step_ms for part in (parts.compute_ms, parts.exposed_ms, parts.optimizer_ms))  # type: ignore[return-value]  # of three parts


# 1-bit Adam's paper, table 1: BERT-large's 672 MB of fp16 gradients, no overlap; ms of an all-reduce by GPUs.
BERT = TrafficInputs(parameters=None, trainable=336_000_000, parameter_bytes=2, gradient_bytes=2)


def bert(link: Link, workers_per_node: int, all_reduce_ms: float, nodes: int) -> Prediction:
    two = Layout(nodes=2, workers_per_node=workers_per_node)
    size = BERT.trainable * BERT.gradient_bytes
    curve = fit_curve([(size // 2, all_reduce_ms * 500), (size, all_reduce_ms * 1000)])
    calibration = Calibration(
        costs=StepCosts(compute_ms=0.0),
        layout=two,
        per_device_batch=1,
        work=Work(strategy=Strategy.DDP, load=BERT),
        network=NetworkModel(link=link, layout=two, curves={"all_reduce": curve}),
    )
    layout = Layout(nodes=nodes, workers_per_node=workers_per_node)
    return Prediction(calibration, Scenario(link=link, layout=layout, per_device_batch=1, overlap=False))


@pytest.mark.parametrize(("nodes", "measured_ms"), [(2, 1897.21), (4, 2133.24), (8, 2173.35), (16, 2205.86)])
def test_all_reduce_over_40_gigabit_ethernet_follows_from_two_nodes(nodes: int, measured_ms: float) -> None:
    found = bert(Link(gbit_per_s=40), 4, 1897.21, nodes)
    assert found.step_time_ms == pytest.approx(measured_ms, rel=0.05)
    assert_covers(found, measured_ms)


@pytest.mark.parametrize(("nodes", "measured_ms"), [(4, 297.28), (8, 316.18)])
def test_on_infiniband_two_nodes_tell_too_little_and_the_interval_says_so(nodes: int, measured_ms: float) -> None:
    found = bert(Link(gbit_per_s=100, rdma=True), 8, 183.74, nodes)
    assert 0.35 < 1 - found.step_time_ms / measured_ms < 0.40
    assert_covers(found, measured_ms)


def assert_covers(found: Prediction, measured_ms: float) -> None:
    low, high = found.interval
    assert low <= found.scenario.samples / measured_ms * 1000 <= high


def test_where_nothing_is_exposed_no_bottleneck_is_invented() -> None:
    """PyTorch DDP, ResNet-50 on V100 with 4 x 100 Gbit/s InfiniBand: 0.097 s, with DDP 0.100 s, two nodes 0.104 s."""
    link, two = Link(gbit_per_s=400, rdma=True), Layout(nodes=2, workers_per_node=8)
    resnet = TrafficInputs(parameters=None, trainable=25_557_032, parameter_bytes=4, gradient_bytes=4)
    calibration = Calibration(
        costs=StepCosts(compute_ms=97, host_ms=3),
        layout=Layout(nodes=1),
        per_device_batch=32,
        work=Work(strategy=Strategy.DDP, load=resnet, bucket_bytes=25 << 20),
        network=NetworkModel(link=link, layout=two),
    )
    found = Prediction(calibration, Scenario(link=link, layout=two, per_device_batch=32))
    assert found.bottleneck.kind == "compute"
    assert found.step_time_ms == pytest.approx(104, rel=0.05)
    assert_covers(found, 104)


def test_no_sync_is_explained_but_for_what_a_batch_itself_is_slower_on_two_nodes() -> None:
    """accelerate's documentation, K = 4, seconds a batch without and with no_sync.

    1 node: 0.50 and 0.41. 2 nodes: 2.00 and 0.91. The model has one compute for both; on two nodes each batch took
    0.17 s longer than that without any communication. So its prediction is 14 % too fast, and saves 11 % too much.
    """
    # t + x = 0.50 and t + x / 4 = 0.41.
    exposed = (0.50 - 0.41) / (1 - 1 / 4)
    compute = 0.50 - exposed
    assert (compute, exposed) == pytest.approx((0.38, 0.12))
    costs, comm = StepCosts(compute_ms=compute), CommTimes(step_ms=2.00 - compute)
    batch = step_parts(costs, comm, accumulation=4).step_ms / 4
    assert batch == pytest.approx(0.785)
    assert batch / 0.91 - 1 == pytest.approx(-0.137, abs=0.001)
    assert (2.00 - batch) / (2.00 - 0.91) == pytest.approx(1.115, abs=0.001)
