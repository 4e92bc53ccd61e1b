"""Contrasts with the figures of the lab: 14.7 MB of gradients per step, 166 ms of compute, 100 Mbit/s between nodes.

`CONTRAST` has the same two workers on one node and on two; `CURVE` fills one, two and four nodes.
"""

from __future__ import annotations

import msgspec

from multinode.contrast.figures import Contrast, Side, SlowdownAttribution
from multinode.contrast.judge import with_speeds
from multinode.findings.finding import Finding
from multinode.job.job_files import Change
from multinode.model.workload import JobSettings
from multinode.predict.advice import Advice
from multinode.predict.back_test import Trial, back_test
from multinode.predict.break_even import BreakEven, Needed, NodeGain
from multinode.predict.cost_model import StepParts
from multinode.predict.forecast import Forecast, PredictedScenario
from multinode.predict.network_model import UncertaintySource
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.step_bytes import BytesPerStep
from multinode.records.run import NodeRun
from multinode.records.status import Status
from multinode.stats.estimate import Estimate, Spread, exactly, of_bounds, of_repeats
from multinode.stats.unknown import Unknown
from tests import make
from tests.levers.compressed import compressed

__all__ = ["CONTRAST", "CONTRAST_RUN", "CURVE", "outlook", "side"]

_GRADIENTS_MB = 14.7
_COMPUTE_MS = 166.0
_LINK_GBIT_PER_S = 0.1
_LINKS = (0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0)
_SAMPLES_A_WORKER = 2
_TOKENS_A_SAMPLE = 128
_NETWORK = Bottleneck(kind="network", share=0.876, message="exposed communication takes 1176 of 1342 ms per step (88%)")
_COMPUTE = Bottleneck(kind="compute", share=0.9, message="compute-bound")
_SETTINGS = JobSettings(
    model="models/tiny",
    method="full",
    stage="sft",
    dataset="tiny_sft",
    strategy="DDP",
    per_device_batch=_SAMPLES_A_WORKER,
    accumulation=1,
    sequence_length=_TOKENS_A_SAMPLE,
    packing=False,
    precision="fp32",
    overlap=True,
)
_VERSIONS = {"torch": "2.13.0+cpu", "llamafactory": "0.9.5", "transformers": "5.2.0"}


def about(value: float, part: float) -> Estimate:
    """A figure that is known within this part of it."""
    return Estimate(value=value, low=value / (1 + part), high=value * (1 + part))


def side(role: str, nodes: int, workers_per_node: int, *, exposed_ms: float, rates: tuple[float, ...]) -> Side:
    """A side that was measured once for each of `rates`, in samples/s."""
    world_size = nodes * workers_per_node
    batch = world_size * _SAMPLES_A_WORKER
    speed = of_repeats(rates)
    step_ms = _COMPUTE_MS + exposed_ms
    return Side(
        role=role,
        run_ids=tuple(f"20260104-cc-{role}-{turn}" for turn in range(1, len(rates) + 1)),
        node_names=tuple(f"box{number}" for number in range(1, nodes + 1)),
        nodes=nodes,
        workers_per_node=workers_per_node,
        world_size=world_size,
        settings=_SETTINGS,
        global_batch=batch,
        versions=_VERSIONS,
        samples_per_s=speed,
        tokens_per_s=speed * _TOKENS_A_SAMPLE,
        tgs=speed * (_TOKENS_A_SAMPLE / world_size),
        step_time_ms=Estimate(value=step_ms, low=step_ms - 3, high=step_ms + 4, repeats=len(rates)),
        step_spread=Spread(median=step_ms, p95=step_ms * 1.06, cv=0.03),
        steady_steps=25 * len(rates),
        split=make.split(
            step_ms, compute_ms=138.0, exposed_ms=exposed_ms, wait_ms=4.0, data_ms=3.0, optimizer_ms=17.0, host_ms=4.0,
            overlap=0.05,
        ),
        exposed_ms=about(exposed_ms, 0.01),
        exposed_share=exposed_ms / step_ms,
        bytes_per_step=BytesPerStep(calls=14.7e6, expected=14.7e6, nic=14.74e6) if nodes > 1 else BytesPerStep(),
        bottleneck=_NETWORK if nodes > 1 else _COMPUTE,
        link_gbit_per_s=_LINK_GBIT_PER_S if nodes > 1 else Unknown("one node uses no link"),
        price_per_hour=0.8 * nodes,
        whole_s=about(12_000 / speed.value, 0.02),
        whole_cost=0.8 * nodes * 12_000 / speed.value / 3600,
        cost_per_million_tokens=0.8 * nodes / (speed.value * _TOKENS_A_SAMPLE * 3600) * 1e6,
        power_w=Unknown("the nodes have no GPU"),
        energy_j_per_sample=Unknown("the nodes have no GPU"),
    )  # fmt: skip


def outlook(link: float | None, nodes: int, workers_per_node: int = 1, *, accumulation: int = 1) -> PredictedScenario:
    """A scenario by bytes over bandwidth alone."""
    exposed_ms = _GRADIENTS_MB * 8 / link if link is not None else 0.0
    step_ms = accumulation * _COMPUTE_MS + exposed_ms
    rate = nodes * workers_per_node * _SAMPLES_A_WORKER * accumulation / step_ms * 1000
    alone = workers_per_node * _SAMPLES_A_WORKER / _COMPUTE_MS * 1000
    doubt = 0.03 if link == _LINK_GBIT_PER_S or link is None else 0.12
    return PredictedScenario(
        link_gbit_per_s=link,
        nodes=nodes,
        workers_per_node=workers_per_node,
        per_device_batch=_SAMPLES_A_WORKER,
        accumulation=accumulation,
        strategy="DDP",
        step_time_ms=step_ms,
        samples_per_s=Estimate(value=rate, low=rate / (1 + doubt), high=rate * (1 + doubt)),
        tokens_per_s=rate * _TOKENS_A_SAMPLE,
        speedup=exactly(rate / alone),
        efficiency=rate / alone / nodes,
        parts=StepParts(
            compute_ms=accumulation * _COMPUTE_MS, optimizer_ms=0.0, host_ms=0.0, data_ms=0.0, comm_ms=exposed_ms,
            beyond_ms=exposed_ms, exposed_ms=exposed_ms,
        ),
        bottleneck=_NETWORK if exposed_ms > _COMPUTE_MS else _COMPUTE,
        doubts=(UncertaintySource(part="network", relative=doubt, message="the link is faster than measured"),),
        measured=link == _LINK_GBIT_PER_S and accumulation == 1,
    )  # fmt: skip


_ONE = side("baseline", 1, 2, exposed_ms=0.0, rates=(23.9, 24.1, 24.3))
_MANY = side("candidate", 2, 1, exposed_ms=1176.0, rates=(2.96, 2.98, 2.99))

_OVERHEAD = "never, at any bandwidth: the overhead per message or the throughput of the nodes remains the limit"
_FORECAST = Forecast(
    sources=("one node: run 20260104-cc-baseline-1", "network: nccl-test 20260103-ff at 100 Mbit/s"),
    scenarios=(
        outlook(None, 1),
        *(outlook(link, 2) for link in _LINKS),
        *(outlook(link, 2, accumulation=4) for link in _LINKS[:3]),
    ),
    break_even=BreakEven(
        target=0.9,
        one_node_workers=1,
        nothing_exposed=Needed(code="overhead", message=_OVERHEAD),
        efficient=Needed(value=6.376, low=3.9, code="from", message="at this link rate or higher"),
        beats_one=Needed(value=0.7084, low=0.6118, high=0.8391, code="from", message="at this link rate or higher"),
        accumulation=Needed(
            value=64,
            code="global_batch",
            figures={"ratio": 64},
            message="the global batch becomes 64 times as large",
        ),
        next_node=NodeGain(
            nodes=3,
            samples_per_s=1.49,
            tokens_per_s=190.7,
            worth=exactly(0.124),
            code="adds",
            message="it adds 12% of the speed that it would reach alone",
        ),
    ),
    break_even_of="2 nodes x 1 worker, DDP, batch 2",
    back_test=back_test(
        [Trial(name="2 nodes at 1 Gbit/s", predicted=of_bounds(14.1, (13.4, 14.8)), measured=exactly(13.95))]
    ),
    notes=(Finding(message="the link's rate is that of its NIC"),),
)

_ADVICE = (
    Advice(
        name="one node",
        kind="nodes",
        against_one_node=of_bounds(1.0, (1.0, 1.0)),
        gain=of_bounds(8.09, (7.9, 8.3)),
        outlook=outlook(None, 1, 2),
        change=Change(nodes=1),
        command="--nodes 1",
        why=(Finding(message="24.1 samples/s instead of 2.98"),),
    ),
    Advice(
        name="gradient accumulation 4",
        kind="accumulation",
        against_one_node=of_bounds(0.36, (0.34, 0.38)),
        gain=of_bounds(2.9, (2.75, 3.05)),
        outlook=outlook(_LINK_GBIT_PER_S, 2, accumulation=4),
        memory_gib=0.0,
        effects=(
            Finding(
                message="global batch 16 instead of 4: fewer optimizer steps per epoch; you may have to adjust the "
                "learning rate"
            ),
        ),
        change=Change(overrides=("gradient_accumulation_steps=4",)),
        command="--set gradient_accumulation_steps=4",
        why=(Finding(message="8.64 samples/s instead of 2.98"),),
    ),
    Advice(
        name="fp16 gradients",
        kind="gradients",
        against_one_node=of_bounds(0.22, (0.21, 0.23)),
        gain=of_bounds(1.78, (1.7, 1.86)),
        outlook=outlook(2 * _LINK_GBIT_PER_S, 2),
        memory_gib=0.01,
        effects=(Finding(message="gradients are rounded to 11 significant bits; values above 65504 overflow"),),
        change=Change(levers=compressed("fp16")),
        command="--grad-compress fp16",
        why=(Finding(message="5.3 samples/s instead of 2.98"),),
    ),
)


def _alone(name: str, rates: tuple[float, ...], times_ms: tuple[float, ...]) -> Side:
    return msgspec.structs.replace(
        _ONE,
        role="each-node",
        node_names=(name,),
        samples_per_s=of_repeats(list(rates)),
        step_time_ms=of_repeats(list(times_ms)),
    )


_ALONE = (_alone("box1", (12.2, 12.3), (164.0, 163.0)), _alone("box2", (12.0, 12.1), (167.0, 166.0)))

CONTRAST = Contrast(
    mode="same-workers",
    why=Finding(code="enough-slots", message="node 0 has 2 slots, enough for all workers of the 2 nodes"),
    job="tiny_sft.yaml (LLaMA-Factory sft full)",
    baseline=_ONE,
    candidate=msgspec.structs.replace(
        with_speeds((_ONE, _MANY))[1],
        versions=_VERSIONS | {"torch": "2.13.1+cpu"},
        disturbances=(Finding(message="box2: other processes used 31% of the CPUs"),),
        stragglers=("box2",),
    ),
    scaling="same workers",
    others=with_speeds((_ONE, *_ALONE))[1:],
    loss=SlowdownAttribution(
        ideal_ms=166.0, node_ms=2.5, network_ms=1173.5, other_ms=0.0, cause="network",
        message="exposed communication takes 1174 ms of each step of 1342 ms",
    ),
    verdict=Finding(
        code="slower",
        message="2 nodes are 8.1x slower (8.0x to 8.2x) than 1 node with the same 2 workers: the network is the "
    "bottleneck.",
    ),
    reasons=(
        Finding(code="step-parts", message="A step takes 1342 ms on 2 nodes: 88% exposed communication, "
        "10% compute; 166 ms on 1 node: 83% compute, 10% optimizer."),
        Finding(message="Network: 14.7 MB per step and direction: on average 93% of TCP line "
        "rate (94.1 Mbit/s on a link of 100 Mbit/s)."),
        Finding(code="each-alone", message="Alone: box1 12.2 samples/s (100%), box2 12.1 samples/s (98%)."),
    ),
    differences=(Finding(message="torch: 2.13.0+cpu on 1 node, 2.13.1+cpu on 2 nodes."),),
    forecast=_FORECAST,
    advice=_ADVICE,
    rule="the first 5 of 30 steps are excluded as warm-up",
)  # fmt: skip


def _curve() -> Contrast:
    _, point, candidate = with_speeds(
        (
            _ONE,
            side("point", 2, 2, exposed_ms=1176.0, rates=(5.90, 5.96, 6.01)),
            side("candidate", 4, 2, exposed_ms=1764.0, rates=(8.1, 8.29, 8.4)),
        )
    )
    sentence = "exposed communication takes 1174 ms of each step of 1930 ms"
    return msgspec.structs.replace(
        CONTRAST,
        mode="scale-out",
        why=Finding(message="every node has 2 slots"),
        candidate=candidate,
        others=(point,),
        scaling="weak",
        forecast=Unknown("no nccl-test of these nodes is stored"),
        advice=(),
        loss=msgspec.structs.replace(CONTRAST.loss, message=sentence),
        verdict=Finding(
            code="harmful",
            message="Do not use 4 nodes for this job: they are 2.9x slower (2.8x to 3.0x) than 1 node; the network "
            "is the bottleneck.",
        ),
        reasons=(
            Finding(
                message="A step takes 1930 ms on 4 nodes: 91% exposed communication, 7% compute; 166 ms on 1 "
                "node: 83% compute, 10% optimizer."
            ),
            Finding(
                message="Network: 14.7 MB per step and direction: on average 65% of TCP line rate (94.1 "
                "Mbit/s on a link of 100 Mbit/s)."
            ),
            Finding(
                message="Compute per step takes 138 ms on 4 nodes and 138 ms on 1 node. Without the cost of the "
                "network, a step would take about 756 ms."
            ),
        ),
        differences=(
            Finding(
                message="Global batch: 4 on 1 node, 16 on 4 nodes. With the larger batch, an epoch has 1/4 of the "
                "optimizer steps, so you may have to adjust learning rate and warm-up."
            ),
        ),
    )


CURVE = _curve()

CONTRAST_RUN = make.run(
    *(
        NodeRun(name=name, node_rank=rank, state="ended", status=Status(state="ended", exit_code=0, cause="exited"))
        for rank, name in enumerate(("box1", "box2"))
    ),
    run_id="20260104-cc",
    job=CONTRAST.job,
    engine="llamafactory",
    started_s=1_800_000_000.0,
    ended_s=1_800_000_240.0,
    world_size=2,
    kind="contrast",
)
