from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.job.deepspeed import DeepSpeedConfig
from multinode.job.job import parse_training
from multinode.job.job_files import Change
from multinode.levers.averaging import Averaging
from multinode.levers.balance import Balance
from multinode.levers.levers import Levers
from multinode.model.model_size import parse_model
from multinode.model.workload import JobSettings
from multinode.predict.advice import (
    Advice,
    advice_notes,
    against_one_node_to_a_loss,
    may_beat_one_node,
    pays,
    rank_options,
    shortlist,
)
from multinode.predict.calibration import Calibration
from multinode.predict.cost_model import Scenario, StepCosts
from multinode.predict.network_model import Link, NetworkModel
from multinode.predict.prediction import Prediction
from multinode.predict.training_state import GpuMemoryBudget, TrainingState
from multinode.predict.tuning_options import setting_options
from multinode.predict.variants import Subject
from multinode.profile.figures import BalanceOutlook, NodePace, Straggler
from multinode.stats.estimate import Estimate, exactly
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work, fit_curve
from tests.golden import Golden, error_of
from tests.levers.compressed import compressed
from tests.model.trainings import LLAMA_3_8B

TWO = Layout(nodes=2)
G = 14_767_104
LINK = Link(gbit_per_s=1538 / 1448)
CURVES = {
    name: fit_curve([(1 << 20, (1 << 20) / 125), (16 << 20, (16 << 20) / 125)])
    for name in ("all_reduce", "all_gather", "reduce_scatter")
}
TINY = {
    "model_type": "qwen2",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 688,
    "vocab_size": 2048,
    "tie_word_embeddings": True,
}
changed = msgspec.structs.replace


def state(strategy: Strategy = Strategy.DDP, gbit_per_s: float = 0.1, **others: Any) -> TrainingState:
    """A model of 3.7 M parameters on two nodes: 14.7 MB of fp32 gradients, 166 ms of compute."""
    width = 4 if strategy is Strategy.DDP else 2
    calibration = Calibration(
        costs=StepCosts(compute_ms=166, overlap=0),
        layout=Layout(nodes=1, workers_per_node=2),
        per_device_batch=2,
        work=Work(
            strategy=strategy,
            load=TrafficInputs(parameters=G // 4, trainable=G // 4, parameter_bytes=width, gradient_bytes=width),
        ),
        network=NetworkModel(link=LINK, layout=TWO, backend="gloo", curves=CURVES),
    )
    scenario = Scenario(link=Link(gbit_per_s=gbit_per_s), layout=TWO, per_device_batch=2, strategy=strategy)
    deepspeed = DeepSpeedConfig(stage=strategy.stage or 0) if strategy.engine == "DeepSpeed" else None
    usual: dict[str, Any] = {
        "settings": JobSettings(method="full", model="tiny", precision="fp32" if width == 4 else "bf16"),
        "deepspeed": deepspeed,
    }
    return TrainingState(calibration=calibration, scenario=scenario, **(usual | others))


def advise(today: TrainingState) -> tuple[Advice, ...]:
    """Ranked, with their words."""
    return tuple(one.advice for one in rank_options(today))


def named(advice: tuple[Advice, ...], name: str) -> Advice:
    found = [one for one in advice if one.name == name]
    assert len(found) == 1, [one.name for one in advice]
    return found[0]


def figures(advice: Advice) -> dict[str, dict[str, float | str]]:
    """Of the reasons, by code."""
    return {reason.code: reason.figures for reason in advice.why}


def effects(advice: Advice) -> list[tuple[str, dict[str, float | str]]]:
    return [(effect.code, effect.figures) for effect in advice.effects]


def test_why_a_change_pays_or_not(golden: Golden) -> None:
    zero3 = state(Strategy.ZERO3, gpu_memory=GpuMemoryBudget(total_gib=24, peak_gib=20))
    small = changed(zero3, gpu_memory=GpuMemoryBudget(total_gib=0.05))
    dealt = BalanceOutlook(nodes=PACES, gain=Estimate(value=1.5, low=1.4, high=1.7))
    today, sharded = advise(state()), advise(zero3)
    cases = {
        "gradients in fp16": named(today, "gradients in fp16"),
        "a faster link": named(today, "a 10 Gbit/s link"),
        "accumulation under ZeRO-2": named(advise(state(Strategy.ZERO2)), "gradient accumulation 4"),
        "accumulation under ZeRO-3": named(sharded, "gradient accumulation 4"),
        "a strategy that fits": named(sharded, "DDP instead of ZeRO-3"),
        "a strategy that does not": named(advise(small), "DDP instead of ZeRO-3"),
        "samples by speed": named(advise(state(balance=dealt)), "samples by speed"),
        "a pair": named(today, "gradients in fp16 + gradient accumulation 4"),
    }
    golden.check_findings("advice_reasons", {name: advice.why for name, advice in cases.items()})


def test_on_a_slow_link_ddp_is_told_to_send_less_and_less_often() -> None:
    advice = advise(state())
    halved, four = named(advice, "gradients in fp16"), named(advice, "gradient accumulation 4")
    # 1.181 s of communication and 0.166 s of compute per step: (1.181 + 0.166) / (0.59 + 0.166).
    assert halved.gain.value == pytest.approx(1.78, rel=0.02)
    assert four.gain.value == pytest.approx(4 * 1.347 / (1.181 + 4 * 0.166), rel=0.02)
    assert halved.command == "--grad-compress fp16"
    assert halved.change == Change(levers=compressed("fp16"))
    assert four.command == "--set gradient_accumulation_steps=4"
    rounded, larger = ("rounded-gradients", {"bits": 11}), ("larger-batch", {"samples_before": 4, "samples": 16})
    assert effects(four) == [larger]
    assert effects(halved) == [rounded, ("overflow", {})]
    assert figures(halved)["traffic"]["sample_mb_now"] == pytest.approx(7.38, abs=0.01)
    assert figures(halved)["traffic"]["sample_mb"] == pytest.approx(3.69, abs=0.01)
    assert four.memory_gib == 0
    pair = named(advice, "gradients in fp16 + gradient accumulation 4")
    assert pair.command == "--grad-compress fp16 --set gradient_accumulation_steps=4"
    assert pair.gain.value > max(halved.gain.value, four.gain.value)
    assert effects(pair) == [rounded, ("overflow", {}), larger]


PACES = (
    NodePace(node="a", own_ms=100, samples=2, balanced_samples=3, speed=2.9),
    NodePace(node="b", own_ms=300, samples=2, balanced_samples=1, speed=1.0),
)


def test_samples_by_speed_give_what_the_run_says_that_they_would() -> None:
    found = BalanceOutlook(nodes=PACES, gain=Estimate(value=1.5, low=1.4, high=1.7))
    balanced = named(advise(state(balance=found)), "samples by speed")
    assert (balanced.gain.value, balanced.gain.bounds, balanced.kind) == (1.5, (1.4, 1.7), "balance")
    assert balanced.command == "--balance a=2.9,b=1"
    assert balanced.change == Change(levers=Levers(balance=Balance(speeds={"a": 2.9, "b": 1.0})))
    assert [(reason.code, reason.node, reason.figures) for reason in balanced.why[1:]] == [
        ("dealt-samples", "a", {"samples_now": 2, "samples": 3}),
        ("dealt-samples", "b", {"samples_now": 2, "samples": 1}),
    ]
    assert balanced.outlook.samples_per_s.value == pytest.approx(1.5 * state().outlook().samples_per_s.value)
    assert balanced.against_one_node is not None


@pytest.mark.parametrize(
    "today",
    [
        state(),
        state(balance=BalanceOutlook(nodes=PACES, gain=Estimate(value=1.001, low=0.9, high=1.1))),
        state(Strategy.ZERO2, balance=BalanceOutlook(nodes=PACES, gain=Estimate(value=1.5, low=1.4, high=1.7))),
    ],
)
def test_samples_by_speed_are_not_advised_where_they_give_nothing_or_cannot_be(today: TrainingState) -> None:
    assert not [one for one in advise(today) if one.kind == "balance"]


def test_larger_buckets_are_four_times_those_of_torch_where_a_step_fills_several() -> None:
    few = state()
    work = few.calibration.work
    many = changed(few, calibration=changed(few.calibration, work=changed(work, bucket_bytes=1 << 20)))
    assert not [option for option in setting_options(few) if option.kind == "buckets"]
    (option,) = [option for option in setting_options(many) if option.kind == "buckets"]
    # torch's own are of 25 MiB.
    assert option.name == "buckets of 100 MiB"
    assert option.change == Change(overrides=("ddp_bucket_cap_mb=100",))
    assert option.after.scenario.bucket_bytes == 100 << 20


def test_one_node_alone_is_among_the_candidates_with_its_own_rate() -> None:
    today = state()
    alone = named(advise(today), "one node")
    one = Prediction(today.calibration, changed(today.scenario, layout=Layout(nodes=1, workers_per_node=2)))
    assert alone.outlook.samples_per_s.value == one.samples_per_s
    assert alone.gain.value > 1
    assert alone.command == "--nodes 1 --workers-per-node 2"
    assert alone.outlook.link_gbit_per_s is None


def test_one_node_that_was_measured_is_told_as_measured_and_not_as_predicted() -> None:
    today = state()
    rates = {"measured_samples_per_s": 3.0, "single_samples_per_s": 20.0}
    alone = named(advise(changed(today, **rates)), "one node")
    assert alone.measured
    assert alone.gain.value == pytest.approx(20 / 3)
    assert alone.gain.low < 20 / 3 < alone.gain.high
    for unknown in rates:
        assert not named(advise(changed(today, **(rates | {unknown: None}))), "one node").measured
    more = changed(today, **rates, scenario=changed(today.scenario, accumulation=4))
    assert not named(advise(more), "one node").measured


def test_one_node_that_is_faster_comes_before_all_that_is_not_certain_to_beat_it() -> None:
    advice = advise(changed(state(), measured_samples_per_s=3.0, single_samples_per_s=20.0))
    place = [one.name for one in advice].index("one node")
    assert place < [one.name for one in advice].index("gradients in fp16 + gradient accumulation 4")
    for one in advice:
        assert one.against_one_node is not None
        assert one.against_one_node.low <= one.against_one_node.value <= one.against_one_node.high
    four = named(advice, "gradient accumulation 4")
    assert four.against_one_node is not None
    faster = four.outlook.samples_per_s.value / advice[place].outlook.samples_per_s.value
    assert four.against_one_node.value == pytest.approx(faster)
    slower = advise(state(gbit_per_s=100.0))
    best = max(one.gain.value for one in slower)
    assert slower[0].gain.value == best, "one node has no place of its own where it is no faster"


def test_a_gain_over_what_was_measured_is_no_wider_than_its_prediction() -> None:
    today = state()
    rate = today.outlook().samples_per_s.value
    one = named(advise(changed(today, measured_samples_per_s=rate)), "a 10 Gbit/s link")
    low, high = one.outlook.samples_per_s.bounds
    assert low / rate <= one.gain.low + 1e-9
    assert one.gain.high <= high / rate + 1e-9


def test_the_shortlist_has_one_of_each_kind() -> None:
    advice = advise(state())
    kinds = [one.kind for one in shortlist(advice, 3)]
    assert len(kinds) == len(set(kinds)) == 3


def test_the_training_in_bf16_sends_bf16() -> None:
    today = state(settings=JobSettings(method="full", precision="bf16"))
    assert named(advise(today), "gradients in bf16").command == "--grad-compress bf16"


def test_what_is_compressed_already_is_not_advised_again() -> None:
    today = state(settings=JobSettings(method="full", levers=compressed("fp16")))
    assert not [one for one in advise(today) if "gradients in" in one.name]


def test_no_accumulation_makes_a_step_of_more_samples_than_the_data_set_has() -> None:
    names = {
        samples: {
            part
            for one in advise(state(dataset_samples=samples))
            for part in one.name.split(" + ")
            if "accumulation" in part
        }
        for samples in (None, 32, 31, 15, 7)
    }
    # A micro-batch of the two nodes together has 4.
    two, four, eight = (f"gradient accumulation {number}" for number in (2, 4, 8))
    assert names[None] == names[32] == {two, four, eight}
    assert names[31] == {two, four}
    assert names[15] == {two}
    assert names[7] == set()


def test_zero_2_is_told_that_accumulation_does_not_cut_its_traffic() -> None:
    advice = advise(state(Strategy.ZERO2))
    option = named(advice, "gradient accumulation 4")
    # Per sample of two: 2 x G/2 and once Psi before, with Psi spread over four micro-batches after.
    assert figures(option)["repeated-calls"] == pytest.approx({"sample_mb_before": 5.54, "sample_mb": 4.15}, abs=0.01)
    under_ddp = named(advise(state()), "gradient accumulation 4")
    assert option.gain.value < 1.6 < under_ddp.gain.value
    assert not [one for one in advice if one.name.startswith("gradients in")]


def test_zero_3_accumulates_for_nothing() -> None:
    option = named(advise(state(Strategy.ZERO3)), "gradient accumulation 4")
    assert option.gain.value == pytest.approx(1.0, abs=0.02)
    assert "repeated-calls" in figures(option)


def test_zero_3_is_told_to_move_with_the_memory_that_it_takes() -> None:
    today = state(Strategy.ZERO3, gpu_memory=GpuMemoryBudget(total_gib=24, peak_gib=20))
    advice = advise(today)
    ddp, zero2 = named(advice, "DDP instead of ZeRO-3"), named(advice, "ZeRO-2 instead of ZeRO-3")
    assert ddp.command == "--set deepspeed=null"
    assert zero2.command == "--deepspeed-set zero_optimization.stage=2"
    assert zero2.gain.value > 1.2
    parameters = G // 4
    # DDP: 20 bytes a parameter on each worker; ZeRO-3: 16 over two.
    assert ddp.memory_gib == pytest.approx((20 - 8) * parameters / 2**30)
    assert figures(ddp)["fits-gpu"]["gpu_gib"] == 24
    small = advise(changed(today, gpu_memory=GpuMemoryBudget(total_gib=0.05)))
    assert "exceeds-gpu" in figures(named(small, "DDP instead of ZeRO-3"))


def test_what_the_gpus_have_no_room_for_comes_last_whatever_it_would_gain() -> None:
    load = TrafficInputs(parameters=70_553_706_496, trainable=70_553_706_496, parameter_bytes=2, gradient_bytes=2)
    today = state(Strategy.ZERO3, 1.0)
    calibration = changed(today.calibration, work=changed(today.calibration.work, load=load))
    eight = changed(today.scenario, layout=Layout(nodes=8, workers_per_node=8))
    today = changed(
        today, calibration=calibration, scenario=eight, gpu_memory=GpuMemoryBudget(total_gib=24, peak_gib=20)
    )
    advice = advise(today)
    fits = {one.name: one.fits for one in advice}
    assert fits["DDP instead of ZeRO-3"] is False
    assert fits["one node"] is False
    assert fits["gradient accumulation 4"] is True
    assert fits["9 nodes"] is True
    # Activations of twice the batch are not counted.
    assert fits["per-device batch 4"] is None
    assert advice[0].fits is not False
    assert [one.fits is False for one in advice] == sorted(one.fits is False for one in advice)
    assert not any(pays(one) for one in advice if one.fits is False)
    assert any(pays(one) for one in advice)
    assert not [one for one in advice if "+" in one.name and "DDP" in one.name]
    assert figures(named(advice, "DDP instead of ZeRO-3"))["exceeds-gpu"]["gpu_gib"] == 24
    # Where no peak is known, what does not fit by its states alone does not.
    unmeasured = {one.name: one.fits for one in advise(changed(today, gpu_memory=GpuMemoryBudget(total_gib=24)))}
    assert (unmeasured["DDP instead of ZeRO-3"], unmeasured["gradient accumulation 4"]) == (False, None)


def test_a_larger_batch_is_advised_where_its_activations_fit() -> None:
    settings = JobSettings(method="lora", lora_rank=8, precision="bf16", sequence_length=1024, recompute=True)
    load = TrafficInputs(parameters=8_051_232_768, trainable=20_971_520, parameter_bytes=2, gradient_bytes=2)
    today = state(settings=settings, subject=Subject(settings=settings, model=LLAMA_3_8B))
    today = changed(today, calibration=changed(today.calibration, work=changed(today.calibration.work, load=load)))
    # Two samples more: inputs of 32 layers, and three times the logits in fp32.
    more_gib = 2 * 1024 * (32 * 2 * 4096 + 12 * 128_256) / 2**30
    for total_gib, peak_gib, fits in (
        (24, 18, True),
        (24, 20, False),
        (28, None, None),
        (80, None, True),
        (16, None, False),
    ):
        budget = GpuMemoryBudget(total_gib=total_gib, peak_gib=peak_gib)
        batch = named(advise(changed(today, gpu_memory=budget)), "per-device batch 4")
        assert batch.memory_gib == pytest.approx(more_gib)
        assert (total_gib, peak_gib, batch.fits) == (total_gib, peak_gib, fits)


def test_a_count_above_the_measured_peak_is_known_to_be_too_high() -> None:
    # States of 16 bytes a parameter over two workers are 0.0275 GiB; an optimizer of few states had half of it.
    today = state(Strategy.ZERO3, gpu_memory=GpuMemoryBudget(total_gib=0.05, peak_gib=0.014))
    assert named(advise(today), "DDP instead of ZeRO-3").fits is True
    filled = changed(today, gpu_memory=GpuMemoryBudget(total_gib=0.05, peak_gib=0.04))
    assert named(advise(filled), "DDP instead of ZeRO-3").fits is False


def test_parameters_that_stage_3_keeps_elsewhere_come_back_below_it() -> None:
    offloaded = DeepSpeedConfig(stage=3, offload_parameters="cpu", offload_optimizer="cpu")
    advice = advise(state(Strategy.ZERO3, deepspeed=offloaded))
    parameters = G // 4
    # In bf16: parameters whole; DeepSpeed moves the gradients to where the optimizer is, in both stages.
    assert named(advice, "ZeRO-2 instead of ZeRO-3").memory_gib == pytest.approx(2 * parameters / 2**30)


def test_lora_under_zero_3_gains_most_by_a_move() -> None:
    load = TrafficInputs(parameters=8_051_232_768, trainable=20_971_520, parameter_bytes=2, gradient_bytes=2)
    today = state(Strategy.ZERO3, 1.0)
    calibration = changed(today.calibration, work=changed(today.calibration.work, load=load))
    advice = advise(changed(today, calibration=calibration, settings=JobSettings(method="lora", precision="bf16")))
    ddp = named(advice, "DDP instead of ZeRO-3")
    # 2 x 16 GB a micro-batch against the adapter's gradients.
    assert ddp.gain.value > 30
    assert ddp.memory_gib == pytest.approx(15.35 - 7.63, abs=0.05)


def test_a_move_reads_the_job_as_the_other_engine_would_have_it() -> None:
    text = "model_name_or_path: m\nstage: sft\nfinetuning_type: full\nbf16: true\ndeepspeed: ds.json\n"
    # Stage 3 overlaps unless it is told not to; stage 2 does not unless it is told to.
    job = changed(parse_training(text, "job.yaml"), deepspeed_text='{"zero_optimization": {"stage": 3}}')
    had = JobSettings(method="full", model="m", strategy="ZeRO-3", precision="bf16", overlap=True)
    today = state(Strategy.ZERO3, settings=had, subject=Subject(settings=had, job=job, model=TINY))
    advice = advise(today)
    assert named(advice, "ZeRO-2 instead of ZeRO-3").outlook.overlap is False
    ddp = named(advice, "DDP instead of ZeRO-3")
    assert ddp.outlook.overlap is True
    # Trained in fp32 under DDP, so that a hook has something to halve; DeepSpeed sends bf16.
    pair = named(advice, "DDP instead of ZeRO-3 + gradients in bf16")
    assert pair.command == "--grad-compress bf16 --set deepspeed=null"
    assert pair.gain.value > ddp.gain.value


def test_fsdp_moves_to_ddp_in_llamafactory_and_by_hand_in_a_script() -> None:
    found = named(advise(state(Strategy.FSDP)), "DDP instead of FSDP")
    assert found.command == "--set fsdp=null --set fsdp_config=null"
    script = state(Strategy.FSDP, settings=JobSettings(method="script", command="train.py"))
    found = named(advise(script), "DDP instead of FSDP")
    assert found.change is None
    assert "DistributedDataParallel" in found.command


def test_a_json_that_fixes_a_value_is_edited_with_it() -> None:
    fixed: dict[str, int | float | bool] = {"gradient_accumulation_steps": 1, "train_batch_size": 4}
    today = state(Strategy.ZERO1, deepspeed=DeepSpeedConfig(stage=1, fixed=fixed))
    assert named(advise(today), "gradient accumulation 4").command == (
        "--set gradient_accumulation_steps=4 --deepspeed-set gradient_accumulation_steps=4 "
        "--deepspeed-set train_batch_size=16"
    )


def test_a_json_that_fixes_the_global_batch_follows_the_workers() -> None:
    today = state(Strategy.ZERO1, deepspeed=DeepSpeedConfig(stage=1, fixed={"train_batch_size": 4}))
    today = changed(today, slots=(2, 2, 2))
    advice = advise(today)
    assert named(advice, "3 nodes").command == "--nodes 3 --deepspeed-set train_batch_size=6"
    # As many workers make as many samples.
    assert named(advice, "one node").command == "--nodes 1 --workers-per-node 2"
    assert named(advice, "2 workers on each node").command == (
        "--workers-per-node 2 --deepspeed-set train_batch_size=8"
    )


def test_workers_that_the_hostfile_has_no_slots_for_are_written_into_it_first() -> None:
    # One node was measured with two workers on GPUs that its line does not name.
    advice = advise(state(slots=(1, 1)))
    alone, full = named(advice, "one node"), named(advice, "2 workers on each node")
    assert (alone.change, full.change) == (None, None)
    assert (
        alone.command
        == "set 2 ids in gpus=, or slots=2, in the hostfile for node 0; then --nodes 1 --workers-per-node 2"
    )
    assert "for nodes 0, 1; then --workers-per-node 2" in full.command
    one_short = named(advise(state(slots=(2, 1))), "2 workers on each node")
    assert "for node 1; then" in one_short.command
    # A line that says nothing of slots has as many as it has GPUs.
    assert named(advise(state(slots=(None, None))), "one node").change is not None


def test_overlap_is_advised_where_deepspeed_has_none() -> None:
    today = state(Strategy.ZERO2, 1.0)
    today = changed(
        today,
        scenario=changed(today.scenario, overlap=False),
        calibration=changed(
            today.calibration,
            costs=StepCosts(compute_ms=166),
            network=changed(today.calibration.network, backend="nccl"),
            work=changed(today.calibration.work, bucket_bytes=1 << 20),
        ),
        deepspeed=DeepSpeedConfig(stage=2, reduce_bucket_elements=1 << 28),
    )
    found = named(advise(today), "overlap_comm")
    assert found.command == "--deepspeed-set zero_optimization.overlap_comm=true"
    assert found.gain.value > 1.05
    assert found.memory_gib == pytest.approx(0.5)


def test_lora_is_another_training() -> None:
    shape = parse_model(TINY)
    assert shape is not None
    today = state(subject=Subject(settings=JobSettings(method="full", model="tiny"), shape=shape))
    calibration = changed(today.calibration, tokens_per_sample=128)
    found = named(advise(changed(today, calibration=calibration)), "rank-8 LoRA (changes what is trained)")
    assert found.command == "--set finetuning_type=lora --set lora_rank=8"
    ((code, adapter),) = effects(found)
    assert (code, 0 < float(adapter["trainable"]) < 1e6) == ("adapter", True)
    assert found.memory_gib is not None
    assert found.memory_gib < 0
    assert found.gain.value > 4
    # Without the model's shape nothing is said of it.
    assert not [one for one in advise(state()) if "LoRA" in one.name]


def test_a_faster_link_tells_what_to_buy_and_from_where_it_is_worth_it() -> None:
    advice = advise(state())
    ten = named(advice, "a 10 Gbit/s link")
    assert ten.change is None
    assert ten.command == "NICs and a switch with 10 Gbit/s instead of 100 Mbit/s"
    assert figures(ten)["break-even"]["break_even_gbit_per_s"] == pytest.approx(1.1, abs=0.05)
    assert not [one for one in advise(state(gbit_per_s=100)) if one.name.startswith("a link")]


def test_a_script_changes_its_own_settings_and_not_the_wire() -> None:
    advice = advise(state(settings=JobSettings(method="script", command="train.py")))
    assert named(advice, "gradients in fp16").change == Change(levers=compressed("fp16"))
    assert named(advice, "gradient accumulation 4").change is None
    assert "no_sync" in named(advice, "gradient accumulation 4").command


def test_a_node_more_is_an_option_where_the_hostfile_has_it() -> None:
    assert named(advise(state()), "3 nodes").change is None
    assert named(advise(state(slots=(None, None, None))), "3 nodes").command == "--nodes 3"
    alone = state(slots=(None, None))
    alone = changed(alone, scenario=changed(alone.scenario, layout=Layout(nodes=1)))
    assert named(advise(alone), "2 nodes").command == "--nodes 2"


def test_notes_name_what_cannot_be_predicted() -> None:
    today = state()
    costs = changed(today.calibration.costs, data_ms=500)
    late = Straggler(node="b", ranks=(1,), late_ms=300, share=0.25, message="b is slower", hint="look at its load")
    loading = changed(today, calibration=changed(today.calibration, costs=costs), stragglers=(late,))
    waits, straggler = advice_notes(loading, loading.outlook())
    assert waits.figures["data_ms"] == 500
    assert "dataloader_num_workers=4" in (waits.hint or "")
    assert straggler.message.endswith("(25%) for b; without this wait, the training would be up to 1.33x faster")
    assert (straggler.node, straggler.hint, straggler.figures["late_ms"]) == ("b", "look at its load", 300)
    assert [*advice_notes(today, today.outlook())] == []


def test_what_was_measured_is_within_the_interval_of_its_own_gain() -> None:
    today = state()
    rate = today.outlook().samples_per_s.value
    off = advise(changed(today, measured_samples_per_s=rate * 0.8))
    halved = named(off, "gradients in fp16")
    assert halved.gain.high >= halved.outlook.samples_per_s.value / (rate * 0.8)


def test_a_strategy_whose_traffic_is_unknown_is_refused(golden: Golden) -> None:
    today = state(Strategy.ZERO3)
    load = changed(today.calibration.work.load, parameters=None)
    today = changed(today, calibration=changed(today.calibration, work=changed(today.calibration.work, load=load)))
    golden.check_errors("refused_strategy", {"ZeRO-3 of unknown parameters": error_of(advise, today)})


def test_two_changes_become_one() -> None:
    stage = Change(deepspeed=("zero_optimization.stage=2",))
    ddp = Change(overrides=("deepspeed=null",))
    assert stage.joined(ddp) == ddp
    overlap = Change(deepspeed=("zero_optimization.overlap_comm=true",))
    assert stage.joined(overlap).deepspeed == (*stage.deepspeed, *overlap.deepspeed)
    both = Change(levers=compressed("fp16")).joined(Change(overrides=("a=1",), nodes=2))
    assert both.options == "--nodes 2 --grad-compress fp16 --set a=1"
    assert Change(overrides=("a='x y'",)).options == """--set 'a='"'"'x y'"'"''"""


@given(
    strategy=st.sampled_from(list(Strategy)),
    gbit_per_s=st.floats(0.01, 200),
    nodes=st.integers(1, 8),
    accumulation=st.integers(1, 16),
    precision=st.sampled_from(["fp32", "bf16", "fp16", None]),
)
def test_advice_of_anything_is_ranked_honest_and_told_apart(
    strategy: Strategy, gbit_per_s: float, nodes: int, accumulation: int, precision: str | None
) -> None:
    today = state(strategy, gbit_per_s, slots=(None,) * 4)
    today = changed(
        today,
        scenario=changed(today.scenario, layout=Layout(nodes=nodes, workers_per_node=2), accumulation=accumulation),
        settings=JobSettings(method="full", precision=precision),
    )
    advice = advise(today)
    # One node alone comes before all that is not certain to beat it, where it is faster than today.
    first = next((at for at, one in enumerate(advice) if one.name == "one node" and pays(one)), len(advice))
    for part in (advice[:first], advice[first + 1 :]):
        assert [one.gain.value for one in part] == sorted((one.gain.value for one in part), reverse=True)
    assert all((against_one_node_to_a_loss(one) or exactly(0)).low > 1 for one in advice[:first]) or first == len(
        advice
    )
    assert all((against_one_node_to_a_loss(one) or exactly(0)).low <= 1 for one in advice[first + 1 :])
    assert len({one.name for one in advice}) == len(advice)
    rate = today.outlook().samples_per_s.value
    for one in advice:
        low, high = one.gain.bounds
        assert 0 < low <= one.gain.value <= high
        assert one.gain.value == pytest.approx(one.outlook.samples_per_s.value / rate)
        assert one.command
    assert msgspec.json.decode(msgspec.json.encode(advice), type=tuple[Advice, ...]) == advice


def test_local_sgd_diloco_and_power_sgd_are_ranked_with_their_memory_and_their_risk(golden: Golden) -> None:
    today = state(settings=JobSettings(method="full", precision="bf16"))
    today = changed(
        today,
        calibration=changed(
            today.calibration,
            costs=StepCosts(compute_ms=146, optimizer_ms=20, overlap=0),
            matrices=((1920, 1920, 1),),
        ),
    )
    advice = advise(today)
    # 1.255 s of communication and 0.166 s of a node's own work; an average computes 2 x 20 ms.
    local = named(advice, "local SGD every 16 steps")
    assert local.gain.value == pytest.approx(1421 / (166 + (1255 + 40) / 16), rel=0.01)
    assert local.gain.low < local.gain.value < local.gain.high
    assert local.change == Change(levers=Levers(averaging=Averaging(every=16)))
    assert (local.command, local.memory_gib) == ("--average local:16", 0)
    diloco = named(advice, "DiLoCo every 64 steps in fp16")
    assert diloco.command == "--average diloco:64:0.7:0.9:fp16"
    # The parameters of the last round, and the momentum.
    assert diloco.memory_gib == pytest.approx(2 * G / (1 << 30))
    thin = named(advice, "PowerSGD of rank 4")
    # 1920 x 1920 of 3,691,776 become 2 x 4 x 1920; 4.5 x 20 ms.
    rest = 1 - 1920 * 1920 / (G / 4)
    sent_ms = 1255 * (rest + 8 * 1920 / (G / 4))
    assert thin.gain.value == pytest.approx(1421 / (166 + 90 * (1 - rest) + sent_ms), rel=0.01)
    assert thin.change == Change(levers=compressed("powersgd:4"))
    risks = {"local SGD": local.effects, "DiLoCo": diloco.effects, "PowerSGD": thin.effects}
    golden.check_findings("advice_risks", risks)
    names = [one.name for one in advice]
    assert names.index(diloco.name) < names.index(local.name) < names.index("local SGD every 4 steps")


def test_averaging_pays_only_if_it_may_reach_a_loss_before_one_node() -> None:
    advice = advise(state())
    local = named(advice, "local SGD every 16 steps")
    assert local.step_efficiency == pytest.approx(0.795)
    enough = 1 / 0.795
    for beside, is_early in ((enough * 1.01, True), (enough * 0.99, False), (1.01, False)):
        one = changed(local, against_one_node=Estimate(value=0.9, low=0.8, high=beside))
        assert (may_beat_one_node(one), pays(one)) == (is_early, is_early)
    # What sends less in every step is not judged by the steps that averaging saves.
    halved = named(advice, "gradients in fp16")
    assert halved.step_efficiency is None
    assert pays(changed(halved, against_one_node=exactly(0.5)))


def test_averaging_pays_only_if_it_may_reach_a_loss_before_the_training_as_it_is() -> None:
    advice = advise(state())
    local, halved = named(advice, "local SGD every 16 steps"), named(advice, "gradients in fp16")
    fewest = 0.875 / 0.795
    assert local.samples_ratio == pytest.approx((fewest, 1 / 0.675))
    assert halved.samples_ratio[1] == 1
    for more, is_early in ((1.06, True), (1.04, False)):
        faster = exactly(more * fewest)
        assert pays(changed(local, gain=faster, against_one_node=exactly(2.0))) == is_early
        assert pays(changed(halved, gain=faster))


def test_what_cannot_be_averaged_or_approximated_is_not_advised() -> None:
    for today in (
        state(Strategy.ZERO2),
        state(settings=JobSettings(method="full", precision="fp16")),
        state(settings=JobSettings(method="full", levers=compressed("fp16"))),
    ):
        assert not [one.name for one in advise(today) if one.name.startswith(("local SGD", "DiLoCo", "PowerSGD"))]


def test_one_node_that_was_measured_to_be_faster_within_the_noise_is_not_advised() -> None:
    today = state()
    noisy = msgspec.structs.replace(
        today,
        measured_samples_per_s=3.0,
        single_samples_per_s=6.0,
        single_gain=Estimate(value=2.0, low=0.4, high=9.0, repeats=2),
    )
    one = next(
        row.advice for row in rank_options(noisy) if row.advice.kind == "nodes" and row.advice.outlook.nodes == 1
    )
    assert (one.gain.value, one.gain.bounds, pays(one)) == (2.0, (0.4, 9.0), False)
