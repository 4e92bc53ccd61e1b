from __future__ import annotations

import json
import math
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from multinode.records.samples import LossSample, NicBytes, NicSample, Sample, StepSample, parse_samples, plausible_us

STEP = b'{"kind":"step","rank":1,"step":3,"time_s":10.5,"mono_ns":9,"step_time_us":250.0,"samples":4}\n'
NIC = (
    b'{"schema":1,"kind":"nic","time_s":1,"mono_ns":2,"ifname":"eth0","rx_bytes":3,"tx_bytes":4,"rx_packets":5,'
    b'"tx_packets":6,"rx_errors":0,"tx_errors":0,"rx_dropped":0,"tx_dropped":0}'
)


def parse(*lines: bytes) -> list[Sample]:
    return list(parse_samples(lines))


def test_each_kind_becomes_its_type() -> None:
    assert parse(STEP, NIC, b'{"kind":"loss","rank":0,"step":3,"loss":1.5}') == [
        StepSample(rank=1, step=3, time_s=10.5, mono_ns=9, step_time_us=250.0, samples=4),
        NicSample(
            time_s=1,
            mono_ns=2,
            ifname="eth0",
            rx_bytes=3,
            tx_bytes=4,
            rx_packets=5,
            tx_packets=6,
            rx_errors=0,
            tx_errors=0,
            rx_dropped=0,
            tx_dropped=0,
        ),
        LossSample(rank=0, step=3, loss=1.5),
    ]


def test_a_step_has_what_was_metered_and_what_was_not_is_none() -> None:
    line = (
        b'{"schema":1,"kind":"step","rank":1,"step":3,"time_s":10.5,"mono_ns":9,"step_time_us":null,"micro_steps":2,'
        b'"samples":8,"tokens":4096,"effective_tokens":null,"phases_us":{"forward":10.5},'
        b'"nics":{"eth0":{"tx_bytes":4,"rx_bytes":3,"tx_packets":2,"rx_packets":1},'
        b'"mlx5_0/1":{"tx_bytes":8,"rx_bytes":12}},"peak_memory_bytes":1024}'
    )
    (step,) = parse(line)
    assert step == StepSample(
        rank=1,
        step=3,
        time_s=10.5,
        mono_ns=9,
        samples=8,
        micro_steps=2,
        tokens=4096,
        phases_us={"forward": 10.5},
        nics={
            "eth0": NicBytes(tx_bytes=4, rx_bytes=3, tx_packets=2, rx_packets=1),
            "mlx5_0/1": NicBytes(tx_bytes=8, rx_bytes=12),
        },
        peak_memory_bytes=1024,
    )


@pytest.mark.parametrize(
    "line",
    [
        STEP[: len(STEP) // 2],
        b"",
        b"\n",
        b"null",
        b"[1]",
        b'"step"',
        b"\xff\xfe",
        b'{"kind":"tomorrow","x":1}',
        b'{"kind":["step"]}',
        b'{"rank":1}',
        b'{"kind":"step","rank":"one","step":3,"time_s":1,"mono_ns":9}',
        b'{"kind":"loss","rank":0,"step":3,"loss":"low"}',
        b"[" * 100_000,
        b'{"kind":"loss","rank":0,"step":3,"loss":1,"deep":' + b"[" * 100_000,
    ],
)
def test_a_torn_or_foreign_line_is_passed_over_and_its_neighbours_are_kept(line: bytes) -> None:
    assert len(parse(STEP, line, STEP)) == 2


@pytest.mark.parametrize("count", ["-1", "9" * 400, "1e400", "1.5"])
def test_a_count_that_cannot_be_is_no_sample(count: str) -> None:
    line = f'{{"kind": "nic", "time_s": 1, "mono_ns": 2, "ifname": "eth0", "rx_bytes": {count}, "tx_bytes": 4}}'
    assert list(parse_samples([line.encode()])) == []


WHOLE: dict[str, dict[str, Any]] = {
    "step": {"rank": 0, "step": 3, "time_s": 1, "mono_ns": 2},
    "ddp": {
        "rank": 0,
        "step": 3,
        "iteration": 1,
        "bucket_sizes_bytes": [8],
        "forward_us": 1,
        "backward_us": 1,
        "comm_us": 0,
        "overlap_us": 0,
    },
    "device_wait": {"rank": 0, "step": 3, "wait_us": 0, "calls": 1, "of_calls": 1},
    "collective": {
        "rank": 0,
        "collective": "all_reduce",
        "dtype": "float",
        "size_bytes": 8,
        "count": 2,
        "times_us": [1],
    },
    "speed": {"rank": 0, "test": "copy", "dtype": "fp32", "times_us": [1]},
    "cpu": {"time_s": 1, "mono_ns": 2},
    "gpu": {"time_s": 1, "mono_ns": 2, "index": 0},
    "cgroup": {"time_s": 1, "mono_ns": 2, "throttled_us": 0, "periods": 1, "throttled_periods": 0},
    "traffic": {"rank": 0, "traffic": 0, "calls": [{"op": "all_reduce", "group": "0", "size_bytes": 8, "count": 1}]},
}


@pytest.mark.parametrize(
    ("kind", "field", "bounds"),
    [
        ("step", "step_time_us", (1e-3, 1e12)),
        ("ddp", "comm_us", (0, 1e12)),
        ("device_wait", "wait_us", (0, 1e12)),
        ("collective", "times_us", (1e-3, 1e12)),
        ("speed", "times_us", (1e-3, 1e12)),
        ("cpu", "busy_percent", (0, 100)),
        ("cpu", "job_cores", (0, 1e6)),
        ("cpu", "memory_available_gib", (0, 1e6)),
        ("gpu", "sm_percent", (0, 100)),
        ("gpu", "power_w", (0, 1e6)),
        ("gpu", "temperature_c", (-100, 250)),
        ("gpu", "energy_j", (0, 1 << 60)),
        ("cgroup", "quota_cores", (0.01, 1e6)),
        ("cgroup", "throttled_us", (0, 1 << 60)),
    ],
)
def test_a_figure_that_cannot_be_is_no_sample(kind: str, field: str, bounds: tuple[float, float]) -> None:
    def read(value: float) -> int:
        told = [value] if field == "times_us" else value
        return len(parse(json.dumps({"kind": kind} | WHOLE[kind] | {field: told}).encode()))

    least, most = bounds
    assert [read(value) for value in (least, most)] == [1, 1]
    assert [read(value) for value in (least - 1, most * 1.01, 1e300, -1e300, float("nan"), float("inf"))] == [0] * 6


def fill(hint: Any, text: str) -> Any:
    """A value of a field's type as JSON has it, with this text wherever there may be one."""
    parts = [part for part in typing.get_args(hint) if part is not type(None)]
    kind = typing.get_origin(hint) or hint
    if kind is str:
        return text
    if kind in {int, float, bool}:
        return 1 if kind is not bool else True
    if kind is tuple:
        return [fill(parts[0], text)]
    if kind is dict:
        return {text: fill(parts[1], text)}
    if parts:
        return fill(parts[0], text)
    hints = typing.get_type_hints(kind, include_extras=True)
    config = kind.__struct_config__
    tag = {} if config.tag_field is None else {config.tag_field: config.tag}
    return tag | {name: fill(hints[name], text) for name in kind.__struct_fields__}


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value:
            yield from texts(part)
        yield from texts(list(value.values())) if isinstance(value, dict) else ()


@pytest.mark.parametrize(
    "lie",
    [
        "\x1b]0;title\x07\x1b[2J",
        "eth0\nerror: node0: everything is lost",
        "\x7f\x9b31m",
        "\u202etxt.exe\u2028",
        "x" * 100_000,
        "\n" * 100_000,
    ],
)
@pytest.mark.parametrize("kind", typing.get_args(Sample), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_no_text_of_a_sample_moves_a_terminal_or_begins_a_line(kind: Any, lie: str, *, is_ascii: bool) -> None:
    record = fill(kind, lie)
    (sample,) = parse(json.dumps(record, ensure_ascii=is_ascii).encode("utf-8", "replace"))
    assert isinstance(sample, kind)
    shown = msgspec.to_builtins(sample)
    with_lines = {name: shown.pop(name) for name in ("message", "traceback") if record["kind"] == "exception"}
    said = [*texts(shown), *texts([text.replace("\n", "") for text in with_lines.values()])]
    assert all(text.isprintable() for text in said)
    assert max(map(len, [*said, *with_lines.values()]), default=0) <= 20_000


def test_what_an_exception_says_keeps_its_lines() -> None:
    lines = 'Traceback (most recent call last):\n  File "a.py"\nValueError: \u6771'
    record = {"kind": "exception", "rank": 0, "time_s": 1, "type": "ValueError", "message": "a\nb", "traceback": lines}
    (sample,) = parse(json.dumps(record).encode())
    assert (sample.message, sample.traceback) == ("a\nb", lines)  # type: ignore[union-attr]  # of an exception


NONSENSE = (None, -1.0, math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 10**400)


@pytest.mark.parametrize("value", [0.0, 0.5, 1e6, 3600e6])
def test_what_a_step_may_take_is_believed(value: float) -> None:
    assert plausible_us(value) == value


@pytest.mark.parametrize("value", [*NONSENSE, 5e-324, 1e13])
def test_what_no_step_takes_is_as_good_as_missing(value: float | None) -> None:
    assert plausible_us(value) is None
