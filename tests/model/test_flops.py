from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from multinode.cluster.accelerators import short_device_name
from multinode.model.flops import Flops, flops_per_token, mean_peak, peak_of
from multinode.model.model_size import ModelShape, lora_parameters, parse_model
from multinode.profile.throughput import utilisation
from multinode.records.benchmark import BenchedPeak


def shape_of(**sizes: Any) -> ModelShape:
    shape = parse_model({"model_type": "llama", **sizes})
    assert shape is not None
    return shape


# Of their config.json files.
LLAMA_2_7B = shape_of(
    hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, intermediate_size=11008, vocab_size=32000
)
YI_34B = shape_of(
    hidden_size=7168,
    num_hidden_layers=60,
    num_attention_heads=56,
    num_key_value_heads=8,
    intermediate_size=20480,
    vocab_size=64000,
)
LLAMA_3_8B = shape_of(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
)
# Small enough to be counted by hand: queries of 4 x 2, keys and values of 2 x 2, width 6.
BY_HAND = shape_of(
    hidden_size=6,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    intermediate_size=10,
    vocab_size=20,
)
BY_HAND_LAYER = 6 * 8 + 6 * 4 + 6 * 4 + 8 * 6 + 3 * 6 * 10


def xtuner_tflops(shape: ModelShape, sequence_tokens: int, tgs: float) -> float:
    """What XTuner publishes as "TFLOPs" for a speed, in TFLOP/s per GPU, so that its tables can be compared with.

    It is a hardware figure (over the peak, HFU): full training, layers computed a second time in the backward pass,
    causal attention counted half: 8 L (4 h^2 + 3 h f) + 6 h V + 8 L s h a token. It takes every model for one with
    multi-head attention. Where keys and values have fewer heads (Yi, Llama 3, Qwen) it is therefore above
    `Flops.hardware`, which counts the matrices that there are; elsewhere the two are the same.

    Args:
        shape: of the model.
        sequence_tokens: length of the sequences.
        tgs: tokens per second and GPU.
    """
    layers, hidden = shape.layers, shape.hidden
    inner = shape.linears["gate_proj"].outputs
    linears = 8 * layers * (4 * hidden**2 + 3 * hidden * inner)
    return tgs * (linears + 6 * hidden * shape.vocabulary + 8 * layers * sequence_tokens * hidden) / 1e12


# XTuner's published speeds, A100 of 80 GB: the model, tokens of a sequence, tokens per second and GPU, "TFLOPs".
XTUNER = [
    (LLAMA_2_7B, 8, 3028.3, 185.3),
    (LLAMA_2_7B, 32, 2234.2, 193.0),
    (LLAMA_2_7B, 128, 948.6, 180.3),
    (LLAMA_2_7B, 256, 540.1, 176.9),
    (LLAMA_2_7B, 1024, 133.6, 153.9),
    (YI_34B, 8, 485.1, 165.6),
    (YI_34B, 32, 491.5, 209.1),
    (YI_34B, 128, 251.1, 191.8),
    (YI_34B, 256, 119.7, 145.3),
]


@pytest.mark.parametrize(("shape", "sequence_ki", "tgs", "published"), XTUNER)
def test_xtuners_published_figures_follow_from_its_speeds(
    shape: ModelShape, sequence_ki: int, tgs: float, published: float
) -> None:
    assert xtuner_tflops(shape, sequence_ki * 1024, tgs) == pytest.approx(published, rel=0.02)


def test_xtuners_figure_is_our_hardware_figure_with_multi_head_attention() -> None:
    ours = utilisation(flops_per_token(LLAMA_2_7B, 8192, recompute=True), 3028.3, None, "")
    assert xtuner_tflops(LLAMA_2_7B, 8192, 3028.3) == pytest.approx(ours.hardware_tflops)


def test_xtuners_figure_counts_heads_that_grouped_queries_do_not_have() -> None:
    ours = utilisation(flops_per_token(YI_34B, 8192, recompute=True), 485.1, None, "")
    # Keys and values have 8 heads of 128 each for 56: 2 x 7168 x 6144 weights a layer too many, passed four times.
    surplus = 8 * 60 * 2 * 7168 * 6144 * 485.1 / 1e12
    assert xtuner_tflops(YI_34B, 8192, 485.1) == pytest.approx(ours.hardware_tflops + surplus)


@pytest.mark.parametrize("sequence", [512, 2048, 32768])
def test_megatrons_figure_is_our_hardware_figure_with_attention_counted_whole(sequence: int) -> None:
    # Equation 3 of its paper, for a token: 96 l h^2 (1 + s / 6h + V / 16lh). Its feed-forward layer is two matrices of
    # h x 4h, which have as many weights as three of h x 8h/3.
    layers, hidden, vocabulary = 24, 1536, 51200
    shape = shape_of(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        intermediate_size=8 * hidden // 3,
        vocab_size=vocabulary,
    )
    published = 96 * layers * hidden**2 * (1 + sequence / (6 * hidden) + vocabulary / (16 * layers * hidden))
    assert flops_per_token(shape, sequence, recompute=True, causal=False).hardware == pytest.approx(published)


def test_full_training_by_hand() -> None:
    matrices = 3 * BY_HAND_LAYER + 20 * 6
    attention = 3 * (2 * 8 * 100 + 2 * 8 * 100)
    flops = flops_per_token(BY_HAND, 100, causal=False)
    assert flops.model == flops.hardware == 6 * matrices + 3 * attention


def test_a_frozen_base_has_no_weight_gradients() -> None:
    matrices = 3 * BY_HAND_LAYER + 20 * 6
    attention = 3 * (2 * 8 * 100 + 2 * 8 * 100)
    flops = flops_per_token(BY_HAND, 100, adapter_parameters=70, causal=False)
    assert flops.model == 4 * matrices + 6 * 70 + 3 * attention


def test_recomputing_makes_the_layers_once_more_and_not_the_output_layer() -> None:
    attention = 3 * (2 * 8 * 100 + 2 * 8 * 100) / 2
    flops = flops_per_token(BY_HAND, 100, adapter_parameters=70, recompute=True)
    assert flops.hardware - flops.model == 2 * (3 * BY_HAND_LAYER + 70) + attention


def test_an_embedding_that_is_tied_still_multiplies_as_the_output_layer() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    tied = shape_of(**config, vocab_size=1000, tie_word_embeddings=True)
    untied = shape_of(**config, vocab_size=1000)
    assert flops_per_token(tied, 512).model == flops_per_token(untied, 512).model


def test_biases_are_added_and_not_multiplied() -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    with_biases = shape_of(**config, vocab_size=1000, attention_bias=True, mlp_bias=True)
    without = shape_of(**config, vocab_size=1000)
    assert flops_per_token(with_biases, 512).model == flops_per_token(without, 512).model


# What torch counts in one forward and backward pass of a model that transformers makes, for each token: all trained or
# an adapter, without and with recomputing as LLaMA-Factory has it. In a process of its own: importing transformers
# changes the environment. Attention is computed whole, the mask is put on afterwards.
TORCH = """
import json
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
sizes = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
config = AutoConfig.for_model("qwen3", **sizes, intermediate_size=200, vocab_size=500, use_cache=False)
tokens = torch.zeros(2, 64, dtype=torch.long)
linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
counted = []
for adapter in False, True:
    for recompute in False, True:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        if adapter:
            model = get_peft_model(model, LoraConfig(r=8, target_modules=linears))
        model.train()
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, labels=tokens).loss.backward()
        counted.append([adapter, recompute, counter.get_total_flops() / tokens.numel()])
print(json.dumps([config.to_dict(), counted]))
"""


@pytest.mark.torch
def test_flops_are_those_that_torch_counts() -> None:
    answer = subprocess.run([sys.executable, "-c", TORCH], capture_output=True, check=True, timeout=600)
    config, counted = json.loads(answer.stdout.splitlines()[-1])
    shape = parse_model(config)
    assert shape is not None
    assert len(counted) == 4
    for adapter, recompute, flop in counted:
        parameters = lora_parameters(shape, 8, ["all"]) if adapter else None
        flops = flops_per_token(shape, 64, adapter_parameters=parameters, recompute=recompute, causal=False)
        # The angles of rotary position embeddings are made by a multiplication of matrices too.
        assert flop == pytest.approx(flops.hardware, rel=1e-4)


def test_the_rule_stands_in_words_beside_the_figures() -> None:
    flops = flops_per_token(LLAMA_3_8B, 2048, adapter_parameters=20_971_520, recompute=True)
    assert flops.rule == (
        "4 x 7,504,658,432 matrix parameters (with the output layer, without the embedding) + 6 x 20,971,520 "
        "adapter parameters + 3 x attention over 2,048 tokens, counted half (causal); hardware FLOPs also count each "
        "layer's forward pass a second time"
    )
    assert flops.causal


def test_the_rule_says_where_attention_counts_whole() -> None:
    flops = flops_per_token(LLAMA_3_8B, 2048, causal=False)
    assert flops.rule.endswith("+ 3 x attention over 2,048 tokens, counted in full, as in PaLM's MFU")
    assert not flops.causal


def test_utilisation_of_a_known_gpu() -> None:
    flops = Flops(model=40e9, hardware=50e9, causal=True, rule="as counted")
    peak, denominator = mean_peak(["NVIDIA GeForce RTX 4090"], "bf16")
    found = utilisation(flops, 2065.0, peak, denominator)
    assert (found.model_tflops, found.hardware_tflops) == pytest.approx((82.6, 103.25))
    assert (found.mfu, found.hfu) == pytest.approx((0.5, 0.625))
    assert found.denominator == denominator
    assert found.rule == "as counted"


def test_without_a_known_peak_there_is_a_speed_and_no_share() -> None:
    unknown = mean_peak(["a card of next year"], "bf16")
    found = utilisation(flops_per_token(LLAMA_3_8B, 2048), 1000.0, *unknown)
    assert found.model_tflops == pytest.approx(46.64, rel=1e-3)
    assert found.mfu is None
    assert found.hfu is None
    assert found.denominator == "the peak of a card of next year in bf16 is unknown"


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    key_heads = draw(st.integers(1, 8))
    heads = key_heads * draw(st.integers(1, 4))
    head = 8 * draw(st.integers(1, 16))
    return shape_of(
        hidden_size=heads * head,
        num_hidden_layers=draw(st.integers(1, 80)),
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        intermediate_size=draw(st.integers(8, 20_000)),
        vocab_size=draw(st.integers(2, 200_000)),
        tie_word_embeddings=draw(st.booleans()),
    )


LENGTHS = st.integers(1, 1 << 20)


@given(shape=shapes(), tokens=LENGTHS, rank=st.integers(1, 64), causal=st.booleans())
def test_an_adapter_takes_less_than_the_whole_model(shape: ModelShape, tokens: int, rank: int, *, causal: bool) -> None:
    adapter = lora_parameters(shape, rank, ["all"])
    assert adapter is not None
    # Above a third, an adapter's own passes outweigh the weight gradients that the base is spared.
    assume(3 * adapter < shape.layers * sum(linear.parameters for linear in shape.linears.values()))
    full = flops_per_token(shape, tokens, causal=causal)
    lora = flops_per_token(shape, tokens, adapter_parameters=adapter, causal=causal)
    assert lora.model < full.model


@given(shape=shapes(), tokens=LENGTHS, recompute=st.booleans(), adapter=st.none() | st.integers(1, 10**8))
def test_mfu_is_below_hfu_just_where_something_is_recomputed(
    shape: ModelShape, tokens: int, adapter: int | None, *, recompute: bool
) -> None:
    flops = flops_per_token(shape, tokens, adapter_parameters=adapter, recompute=recompute)
    found = utilisation(flops, 1234.5, *mean_peak(["NVIDIA H200"], "bf16"))
    assert found.mfu is not None
    assert found.hfu is not None
    assert found.mfu < found.hfu if recompute else found.mfu == found.hfu


@given(shape=shapes(), one=LENGTHS, other=LENGTHS, recompute=st.booleans())
def test_a_longer_sequence_takes_more_for_each_token(
    shape: ModelShape, one: int, other: int, *, recompute: bool
) -> None:
    assume(one != other)
    short, long = (flops_per_token(shape, tokens, recompute=recompute) for tokens in sorted((one, other)))
    assert short.model < long.model
    assert short.hardware < long.hardware


@given(shapes(), LENGTHS)
def test_causal_attention_is_half_of_the_whole(shape: ModelShape, tokens: int) -> None:
    # Without tokens to attend to, only the matrices are left.
    matrices = flops_per_token(shape, 0).model
    half, whole = (flops_per_token(shape, tokens, causal=causal).model - matrices for causal in (True, False))
    assert 2 * half == pytest.approx(whole)


@given(shapes(), st.lists(st.integers(1, 4096), min_size=2, max_size=20))
def test_packing_sequences_takes_what_they_take_alone(shape: ModelShape, lengths: list[int]) -> None:
    alone = sum(length * flops_per_token(shape, length).model for length in lengths)
    length = sum(length**2 for length in lengths) / sum(lengths)
    packed = sum(lengths) * flops_per_token(shape, length).model
    assert packed == pytest.approx(alone)


# Multiprocessors, boost clock in GHz, and FLOP a clock that the tensor cores of one multiprocessor make of dense bf16
# summed in fp32, from NVIDIA's papers on the GA102, GA100, Ada, Hopper and Blackwell architectures. A GeForce, and the
# L40 like one, sums in fp32 at half the rate of the same chip in a workstation.
HALF, FULL, GA100, HOPPER = 512, 1024, 2048, 4096
CHIPS = [
    ("NVIDIA GeForce RTX 3090", 82, 1.695, HALF),
    ("NVIDIA GeForce RTX 3090 Ti", 84, 1.860, HALF),
    ("NVIDIA GeForce RTX 4080", 76, 2.505, HALF),
    ("NVIDIA GeForce RTX 4090", 128, 2.520, HALF),
    ("NVIDIA GeForce RTX 4090 D", 114, 2.520, HALF),
    ("NVIDIA GeForce RTX 5080", 84, 2.617, HALF),
    ("NVIDIA GeForce RTX 5090", 170, 2.407, HALF),
    ("NVIDIA L40", 142, 2.490, HALF),
    ("NVIDIA L40S", 142, 2.490, FULL),
    ("NVIDIA L4", 58, 2.040, FULL),
    ("NVIDIA RTX 6000 Ada Generation", 142, 2.505, FULL),
    ("NVIDIA RTX A6000", 84, 1.800, FULL),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 188, 2.617, FULL),
    ("NVIDIA A40", 84, 1.740, FULL),
    ("NVIDIA A10", 72, 1.695, FULL),
    ("NVIDIA A30", 56, 1.440, GA100),
    ("NVIDIA GeForce RTX 3080", 68, 1.710, HALF),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 66, 2.610, HALF),
    ("NVIDIA GeForce RTX 4080 SUPER", 80, 2.550, HALF),
    ("NVIDIA GeForce RTX 5070 Ti", 70, 2.452, HALF),
    ("NVIDIA RTX A5000", 64, 1.695, FULL),
    # Its clock is that of its 1 PFLOP/s in FP4 with sparsity.
    ("NVIDIA GB10", 48, 2.543, FULL),
    ("NVIDIA A100-SXM4-80GB", 108, 1.410, GA100),
    ("NVIDIA A100 80GB PCIe", 108, 1.410, GA100),
    ("NVIDIA H100 80GB HBM3", 132, 1.830, HOPPER),
    ("NVIDIA H100 PCIe", 114, 1.620, HOPPER),
    ("NVIDIA H200", 132, 1.830, HOPPER),
]
# The same of fp16, from the papers on the GV100 and the Turing architecture: their tensor cores have nothing else.
BEFORE_AMPERE = [
    ("Tesla V100-SXM2-32GB", 80, 1.530, FULL),
    ("Tesla V100-PCIE-16GB", 80, 1.370, FULL),
    ("Tesla T4", 40, 1.590, FULL),
    ("NVIDIA GeForce RTX 2080 Ti", 68, 1.545, HALF),
]


@pytest.mark.parametrize(("name", "multiprocessors", "boost_ghz", "flop_a_clock"), [*CHIPS, *BEFORE_AMPERE])
def test_a_peak_is_what_the_chip_can_do_without_sparsity(
    name: str, multiprocessors: int, boost_ghz: float, flop_a_clock: int
) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.tflops == pytest.approx(multiprocessors * boost_ghz * flop_a_clock / 1000, rel=0.005)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "words"),
    [
        ("GeForce RTX 4090", "bf16", 165.2, "165.2 TFLOP/s per GPU, dense bf16 with fp32 accumulation (NVIDIA Ada"),
        ("GeForce RTX 4090", "fp16", 165.2, "165.2 TFLOP/s per GPU, dense fp16 with fp32 accumulation (NVIDIA Ada"),
        ("GeForce RTX 4090", "fp32", 82.6, "82.6 TFLOP/s per GPU, dense fp32 (NVIDIA Ada"),
        ("A100-SXM4-80GB", "tf32", 156.0, "156 TFLOP/s per GPU, dense tf32 with fp32 accumulation (NVIDIA A100"),
        ("A100-SXM4-80GB", "fp32", 19.5, "19.5 TFLOP/s per GPU, dense fp32 (NVIDIA A100"),
        ("H200", "fp8", None, "the peak of H200 in fp8 is unknown"),
        ("B200", "fp32", None, "the peak of B200 in fp32 is unknown"),
        ("Tesla T4", "fp16", 65.0, "65 TFLOP/s per GPU, dense fp16 with fp32 accumulation (NVIDIA Turing"),
        ("Tesla T4", "bf16", None, "the peak of Tesla T4 in bf16 is unknown"),
        ("Tesla T4", "tf32", None, "the peak of Tesla T4 in tf32 is unknown"),
    ],
)
def test_a_share_is_of_the_peak_in_the_precision_that_ran(
    name: str, dtype: str, tflops: float | None, words: str
) -> None:
    peak, denominator = mean_peak([name], dtype)
    assert peak == tflops
    assert denominator.startswith(words)


@pytest.mark.parametrize(("name", "multiprocessors", "boost_ghz", "flop_a_clock"), BEFORE_AMPERE)
def test_a_gpu_whose_tensor_cores_know_fp16_alone_has_its_own_fp32(
    name: str, multiprocessors: int, boost_ghz: float, flop_a_clock: int
) -> None:
    assert flop_a_clock
    assert mean_peak([name], "fp32")[0] == pytest.approx(multiprocessors * boost_ghz * 128 / 1000, rel=0.015)


def test_what_differs_in_its_links_alone_has_the_same_peak() -> None:
    for name, like in (("A800-SXM4-80GB", "A100-SXM4-80GB"), ("A800 80GB PCIe", "A100 80GB PCIe")):
        assert peak_of(f"NVIDIA {name}") == peak_of(f"NVIDIA {like}") is not None
    for name, like in (("H800", "H100 80GB HBM3"), ("H800 PCIe", "H100 PCIe")):
        ours, theirs = peak_of(f"NVIDIA {name}"), peak_of(f"NVIDIA {like}")
        assert ours is not None
        assert theirs is not None
        assert [ours.in_precision(one)[0] for one in ("bf16", "fp32", "tf32")] == [
            theirs.in_precision(one)[0] for one in ("bf16", "fp32", "tf32")
        ]
        assert ours.memory_gb_per_s == theirs.memory_gb_per_s


def test_what_a_data_sheet_alone_tells() -> None:
    """Of the L20 and the GH200 dense figures; of AMD's compute units 304 at 2.1 GHz, 2048 FLOP a clock."""
    assert mean_peak(["NVIDIA L20"], "bf16")[0] == 119.5
    assert mean_peak(["NVIDIA GH200 480GB"], "bf16")[0] == 989.5
    for name in ("AMD Instinct MI300X", "AMD Instinct MI325X"):
        tflops, source = mean_peak([name], "bf16")
        assert tflops == pytest.approx(304 * 2.1 * 2048 / 1000, rel=0.001)
        assert "AMD Instinct MI3" in source
        assert mean_peak([name], "fp32")[0] == pytest.approx(304 * 2.1 * 256 / 1000, rel=0.001)


@pytest.mark.parametrize(
    ("name", "units", "flop_a_clock", "ghz", "memory_gb_per_s"),
    [
        ("NVIDIA GH200 144G HBM3e", 132, 4096, 1.83, 4900),
        ("NVIDIA H20-3e", 78, 1024, 1.85, 4800),
        ("NVIDIA A10G", 80, 512, 1.71, 600),
        ("NVIDIA RTX 5000 Ada Generation", 100, 1024, 2.55, 576),
        # Its tensor cores are slowed down by 2375 / 3352.
        ("NVIDIA GeForce RTX 5090 D", 170, 512 * 2375 / 3352, 2.407, 1792),
        ("AMD Instinct MI355X", 256, 4096, 2.4, 8000),
        ("AMD Radeon RX 7900 XTX", 96, 512, 2.5, 960),
        ("AMD Radeon AI PRO R9700", 64, 1024, 2.92, 640),
    ],
)
def test_a_peak_is_that_of_its_units_at_their_clock(
    name: str, units: int, flop_a_clock: float, ghz: float, memory_gb_per_s: float
) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.tflops == pytest.approx(units * flop_a_clock * ghz / 1000, rel=0.005)
    assert peak.memory_gb_per_s == memory_gb_per_s


def test_what_a_bench_measured_stands_in_for_a_peak_that_is_unknown() -> None:
    benched = [
        BenchedPeak(gpu="NVIDIA A100-SXM4-40GB MIG 1g.5gb", dtype="bf16", tflops=40.0, run_id="20260104-be"),
        BenchedPeak(gpu="NVIDIA H200", dtype="bf16", tflops=700.0, run_id="20260104-be"),
    ]
    part = "A100-SXM4-40GB MIG 1g.5gb"
    tflops, denominator = mean_peak([part], "bf16", benched)
    assert tflops == 40.0
    told = "not the peak, which is unknown: the fastest product of bench 20260104-be"
    assert denominator == f"40 TFLOP/s per GPU, dense bf16 with fp32 accumulation ({told})"
    # Where the peak is known, it counts; another precision was not measured.
    assert mean_peak(["NVIDIA H200"], "bf16", benched)[0] == 989.5
    assert mean_peak([part], "fp16", benched) == (None, f"the peak of {part} in fp16 is unknown")
    mixed = mean_peak([part, "NVIDIA H200"], "bf16", benched)[1]
    assert mixed.endswith(f"(mean of 1 x {part}, 1 x NVIDIA H200; {part}: {told})")


def test_a_figure_with_sparsity_is_halved_and_said_to_be() -> None:
    _, denominator = mean_peak(["NVIDIA H100 80GB HBM3"], "bf16")
    assert "989.5 TFLOP/s" in denominator
    assert "half of the 1979 TFLOP/s with sparsity" in denominator


def test_an_older_driver_leaves_the_maker_out() -> None:
    assert peak_of("A100-SXM4-40GB") == peak_of("NVIDIA A100-SXM4-40GB") is not None


@pytest.mark.parametrize(
    "name",
    [
        "",
        "NVIDIA",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 40",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM2e",
        "Tesla P100-SXM2-16GB",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX 5090 D v2",
        "AMD Radeon RX 6900 XT",
        "AMD Instinct MI250X",
    ],
)
def test_of_another_gpu_nothing_is_said(name: str) -> None:
    assert peak_of(name) is None


def test_workers_on_unequal_gpus_are_held_to_the_mean() -> None:
    mean, words = mean_peak(["NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090"], "bf16")
    assert mean == pytest.approx((165.2 + 165.2 + 71.2) / 3)
    assert words.endswith("(mean of 2 x NVIDIA GeForce RTX 4090, 1 x NVIDIA GeForce RTX 3090)")


def test_workers_on_equal_gpus_have_the_peak_of_one() -> None:
    assert mean_peak(["NVIDIA L40S"] * 4, "bf16") == mean_peak(["NVIDIA L40S"], "bf16")


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ([], "no worker uses a GPU"),
        (["NVIDIA L40S", "a card of next year"], "the peak of a card of next year in bf16 is unknown"),
    ],
)
def test_one_unknown_gpu_leaves_no_mean(names: list[str], why: str) -> None:
    assert mean_peak(names, "bf16") == (None, why)


# FLOP a clock that one multiprocessor makes in fp32 outside its tensor cores, and the clock where it is another one.
FP32_CLOCKS = [
    *((name, count, ghz, 128 if "A100" in name or "A30" in name else 256) for name, count, ghz, _ in CHIPS[:-3]),
    ("NVIDIA H100 80GB HBM3", 132, 1.980, 256),
    ("NVIDIA H100 PCIe", 114, 1.755, 256),
    ("NVIDIA H200", 132, 1.980, 256),
]


@pytest.mark.parametrize(("name", "multiprocessors", "boost_ghz", "flop_a_clock"), FP32_CLOCKS)
def test_fp32_is_what_the_multiprocessors_can_do_and_tf32_half_of_bf16(
    name: str, multiprocessors: int, boost_ghz: float, flop_a_clock: int
) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.fp32_tflops == pytest.approx(multiprocessors * boost_ghz * flop_a_clock / 1000, rel=0.015)
    assert peak.tf32_tflops == pytest.approx(peak.tflops / 2, rel=0.015)
    assert peak.others_source


# Width of the memory's bus in bits, and Gbit/s of each of its lines, as the makers of the memory sell it.
@pytest.mark.parametrize(
    ("name", "bits", "gbit_per_s"),
    [
        ("NVIDIA GeForce RTX 3090", 384, 19.5),
        ("NVIDIA GeForce RTX 3090 Ti", 384, 21),
        ("NVIDIA GeForce RTX 4080", 256, 22.4),
        ("NVIDIA GeForce RTX 4090", 384, 21),
        ("NVIDIA GeForce RTX 5080", 256, 30),
        ("NVIDIA GeForce RTX 5090", 512, 28),
        ("NVIDIA RTX 6000 Ada Generation", 384, 20),
        ("NVIDIA RTX A6000", 384, 16),
        ("NVIDIA A40", 384, 14.5),
        ("NVIDIA A10", 384, 12.5),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 512, 28),
        ("NVIDIA L4", 192, 12.5),
        ("NVIDIA L40S", 384, 18),
        ("NVIDIA A100-SXM4-40GB", 5120, 2.43),
        ("NVIDIA A100-SXM4-80GB", 5120, 3.19),
        ("NVIDIA H100 80GB HBM3", 5120, 5.23),
    ],
)
def test_memory_is_as_fast_as_its_bus(name: str, bits: int, gbit_per_s: float) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.memory_gb_per_s == pytest.approx(bits * gbit_per_s / 8, rel=0.005)


@pytest.mark.parametrize(
    ("name", "tflops", "memory_gb_per_s"),
    [
        # Half of the 360 PFLOP/s with sparsity of a rack, by its 72 GPUs.
        ("NVIDIA GB300", 180_000 / 72, None),
        # Four times the fp32 of its sheet; 512 bits at 25 Gbit/s, which is lower than that of a workstation's.
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4 * 120.0, 512 * 24.95 / 8),
    ],
)
def test_a_peak_that_a_data_sheet_alone_tells(name: str, tflops: float, memory_gb_per_s: float | None) -> None:
    peak = peak_of(name)
    assert peak is not None
    assert peak.tflops == pytest.approx(tflops, rel=0.001)
    if memory_gb_per_s is None:
        assert peak.memory_gb_per_s is None
    else:
        assert peak.memory_gb_per_s == pytest.approx(memory_gb_per_s, rel=0.001)


def test_a_figure_that_is_not_known_of_one_gpu_is_not_guessed() -> None:
    peak = peak_of("NVIDIA B200")
    assert peak is not None
    assert (peak.fp32_tflops, peak.tf32_tflops, peak.memory_gb_per_s) == (None, None, None)


@pytest.mark.parametrize(
    "name",
    ["CPU", "AMD EPYC 9B14 96-Core Processor", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "AMD Ryzen 9 A40", ""],
)
def test_a_processor_has_no_peak_here(name: str) -> None:
    assert peak_of(name) is None
    assert peak_of(short_device_name(name)) is None
    assert mean_peak([name, "NVIDIA A40"], "bf16")[0] is None
