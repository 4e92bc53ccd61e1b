"""The layers that are measured: that they are what they are called, and that the formula counts their FLOPs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multinode.bench.figures import work_of
from multinode.node.bench.device_ops import LAYERS, Layer, layer_sizes, make_layer
from multinode.records.samples import SpeedSample

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Torch's counter sets it where it is not set.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_the_formula_counts_what_torch_counts(name: str, *, backward: bool) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    run = make_layer(torch, torch.device("cpu"), name, "fp32", backward=backward)
    # Attention by its own matrix products, which torch's counter knows whatever the device.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run()
    sizes: dict[str, Any] = {**layer_sizes(name, "cpu")}
    sample = SpeedSample(rank=0, test=name, dtype="fp32", backward=backward, **sizes)
    work = work_of(sample)
    assert work is not None
    assert counter.get_total_flops() == work.amount


@pytest.mark.parametrize(
    ("name", "looks_ahead"), [("bert", True), ("gpt2", False), ("t5_encoder", True), ("t5_decoder", False)]
)
def test_decoders_look_back_alone(name: str, *, looks_ahead: bool) -> None:
    import torch

    torch.manual_seed(1)
    layer = Layer(torch, torch.device("cpu"), name, torch.float64, (1, 16, 1024))
    inputs = torch.randn(1, 16, 1024, dtype=torch.float64)
    changed = inputs.clone()
    changed[0, -1] += 1
    with torch.no_grad():
        first, second = layer.run(inputs), layer.run(changed)
    assert first.isfinite().all()
    assert (not torch.equal(first[0, 0], second[0, 0])) is looks_ahead


def test_berts_layer_is_that_of_torch() -> None:
    import torch

    torch.manual_seed(1)
    mine = Layer(torch, torch.device("cpu"), "bert", torch.float64, (1, 16, 1024))
    theirs = torch.nn.TransformerEncoderLayer(
        1024, 16, 4096, dropout=0.0, activation="gelu", batch_first=True, dtype=torch.float64
    )
    query, key, value, out, up, down, first, second = (mine.wanted[place : place + 2] for place in range(0, 16, 2))
    names = {
        "self_attn.in_proj_weight": torch.cat([query[0], key[0], value[0]]),
        "self_attn.in_proj_bias": torch.cat([query[1], key[1], value[1]]),
    }
    for name, (weight, bias) in {
        "self_attn.out_proj": out,
        "linear1": up,
        "linear2": down,
        "norm1": first,
        "norm2": second,
    }.items():
        names |= {f"{name}.weight": weight, f"{name}.bias": bias}
    theirs.load_state_dict(names)
    inputs = torch.randn(1, 16, 1024, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(mine.run(inputs), theirs(inputs))
