"""The screens of contrast, compare, predict and advise, whole, at 80 and 160 columns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.contrast.figures import Contrast
from multinode.contrast.judge import compare
from multinode.contrast.screen import show
from multinode.findings.finding import Finding
from multinode.predict.advice import Recommendations
from multinode.predict.advice_screen import show as show_advice
from multinode.predict.forecast import Forecast, ForecastRequest, make_forecast
from multinode.predict.request import forecast_benchmarks
from multinode.predict.screen import show as show_forecast
from multinode.records.invocation import Invocation
from multinode.render.following import following
from multinode.render.sheet import Block
from multinode.render.table import Part, screen_text
from multinode.render.terminal import block_parts
from multinode.stats.estimate import exactly, of_bounds
from multinode.stats.unknown import UNMEASURED, Unknown
from tests.contrast.contrasts import CONTRAST, CURVE, outlook
from tests.contrast.made_up_sides import side_of, split_of
from tests.contrast.test_words import CASES
from tests.golden import Golden
from tests.predict.test_sheets import EVIDENCE

MORE = "multinode show 20260104-cc --details"
NEXT = "multinode tune --judge speed --from 20260104-cc --candidates 2 --hosts lab"
HOSTILE = "\x1b[2J[bold]\u202e"
HOSTILE_ONES = (Finding(message=HOSTILE),)

COMPARED = compare(
    [
        side_of("baseline", 100.0, split=split_of(40.0), run_ids=("20260104-101500-abcd",)),
        side_of("candidate", 78.4, 2, split=split_of(102.0, 61.0), run_ids=("20260105-101500-dcba",)),
    ],
    mode="compare",
    why=Finding(message="run b compared with run a"),
    job="sft.yaml",
    rule="the first 5 of 30 steps are excluded as warm-up",
)
UNKNOWN = msgspec.structs.replace(
    CONTRAST,
    baseline=msgspec.structs.replace(CONTRAST.baseline, split=UNMEASURED, exposed_ms=UNMEASURED, settings=UNMEASURED),
    candidate=msgspec.structs.replace(CONTRAST.candidate, split=UNMEASURED, exposed_ms=UNMEASURED, settings=UNMEASURED),
    forecast=Unknown("no nccl-test of these nodes is stored"),
    advice=(),
    differences=tuple(Finding(message=f"package-{number}: 1 on 1 node, 2 on 2 nodes") for number in range(5)),
)

BATCH = msgspec.structs.replace(
    CONTRAST.advice[2], name="per-device batch 64", memory_gib=30.0, fits=False, gain=of_bounds(3.1, (2.9, 3.3))
)
SLOWER = msgspec.structs.replace(BATCH, name="3 nodes", fits=None, gain=of_bounds(0.9, (0.85, 0.95)))
assert isinstance(CONTRAST.forecast, Forecast)
RECOMMENDATIONS = Recommendations(
    runs=("20260104-cc-baseline-1",),
    sources=("2 nodes: run 20260104-cc-candidate-1",),
    today=outlook(0.1, 2),
    measured_samples_per_s=2.98,
    advice=(*CONTRAST.advice, SLOWER, BATCH),
    notes=(Finding(message="the link's rate is that of its NIC"),),
    back_test=CONTRAST.forecast.back_test,
    command=Invocation(verb="launch", options=(("--hosts", "my nodes.txt"),), job=("configs/tiny sft.yaml",)),
)
USELESS = msgspec.structs.replace(RECOMMENDATIONS, advice=(SLOWER, BATCH), back_test=None)


# Measured to be slower than the one node beside it.
SLOW = {
    "today": msgspec.structs.replace(
        outlook(0.1, 2), speedup=of_bounds(0.12, (0.11, 0.13)), workers_per_node=1, samples_per_s=exactly(2.98)
    ),
    "one_node": msgspec.structs.replace(outlook(None, 1, 2), measured=True),
    "command": Invocation(verb="launch", options=(("--hosts", "lab"),), job=("configs/tiny sft.yaml",)),
}


@functools.cache
def predicted(**asked: object) -> Forecast:
    return make_forecast(EVIDENCE, msgspec.convert(asked, ForecastRequest))


TITAN = Path(__file__).parent.parent / "predict" / "published_pairs" / "titan-708-faulty.yaml"


@functools.cache
def badly_used() -> Forecast:
    return forecast_benchmarks(TITAN, ForecastRequest(links=(100.0, 3200.0)))


def answered(*blocks: Block, details: bool) -> list[Part]:
    return list(block_parts(blocks, details=details))


def advised(recommendations: Recommendations, count: int = 3, *, details: bool = False) -> list[Part]:
    return answered(*show_advice(recommendations, None if details else count), *following(MORE, NEXT), details=details)


def contrasted(contrast: Contrast, more: str = "", next_command: str = "", *, details: bool = False) -> list[Part]:
    return answered(*show(contrast), *following(more, next_command), details=details)


def forecast(forecast: Forecast, more: str = "", next_command: str = "", *, details: bool = False) -> list[Part]:
    return answered(*show_forecast(forecast), *following(more, next_command), details=details)


# Made when they are shown: a forecast takes a second.
SCREENS: dict[str, Callable[[], list[Part]]] = {
    "contrast": lambda: contrasted(CONTRAST, MORE, NEXT),
    "contrast-curve": lambda: contrasted(CURVE, MORE, "multinode report 20260104-cc"),
    "contrast-details": lambda: contrasted(CONTRAST, details=True),
    "contrast-noise": lambda: contrasted(CASES["same workers, noise"]),
    "contrast-slow-node": lambda: contrasted(CASES["slow node, by its waits"]),
    "contrast-shortfall": lambda: contrasted(
        msgspec.structs.replace(
            CONTRAST, forecast=msgspec.structs.replace(CONTRAST.forecast, shortfall=badly_used().shortfall)
        )
    ),
    "contrast-unknown": lambda: contrasted(UNKNOWN, MORE),
    "compare": lambda: contrasted(COMPARED, "multinode compare 20260104 20260105 --details"),
    "advise": lambda: advised(RECOMMENDATIONS),
    "advise-details": lambda: advised(RECOMMENDATIONS, details=True),
    "advise-nothing": lambda: advised(USELESS),
    "predict": lambda: forecast(predicted(), more="multinode predict --details", next_command="multinode advise"),
    "predict-details": lambda: forecast(predicted(links=(0.1, 1.0), accumulations=(1, 4)), details=True),
    "predict-many": lambda: forecast(predicted(links=(0.1, 1.0), accumulations=tuple(range(1, 21)))),
    "predict-one": lambda: forecast(predicted(links=(10.0,))),
    "predict-badly-used": lambda: forecast(badly_used(), more="multinode predict --benchmarks figures.yaml --details"),
    "predict-slow": lambda: forecast(msgspec.structs.replace(predicted(links=(0.8,)), **SLOW)),
}


@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_is_the_golden_one(name: str, golden: Golden) -> None:
    # What is read most fits a terminal, with its prompt.
    is_short = name.startswith("contrast") and not name.endswith("-details")
    golden.check_screen(name, SCREENS[name](), most_lines=22 if is_short else None)


def test_what_was_measured_or_has_no_room_is_not_among_what_to_try() -> None:
    one_node, accumulation, half = CONTRAST.advice
    asked = (msgspec.structs.replace(accumulation, measured=True), msgspec.structs.replace(half, fits=False), one_node)
    text = screen_text(contrasted(msgspec.structs.replace(CONTRAST, advice=asked)))
    assert not any(one.name in text for one in asked), "one node is the baseline, which was measured"


@pytest.mark.parametrize(
    "screen",
    [
        lambda: contrasted(
            msgspec.structs.replace(
                CONTRAST,
                verdict=Finding(message=HOSTILE),
                rule=HOSTILE,
                differences=(Finding(message=HOSTILE),),
                reasons=(Finding(message=HOSTILE),),
                advice=(msgspec.structs.replace(CONTRAST.advice[1], name=HOSTILE, why=(Finding(message=HOSTILE),)),),
            ),
            details=True,
        ),
        lambda: advised(
            msgspec.structs.replace(
                RECOMMENDATIONS,
                advice=(
                    msgspec.structs.replace(
                        BATCH, name=HOSTILE, why=HOSTILE_ONES, effects=HOSTILE_ONES, command=HOSTILE
                    ),
                ),
            ),
            details=True,
        ),
        lambda: forecast(msgspec.structs.replace(predicted(), notes=HOSTILE_ONES, sources=(HOSTILE,)), details=True),
    ],
)
def test_nothing_that_a_record_holds_moves_the_cursor_or_is_taken_for_markup(screen: Callable[[], list[Part]]) -> None:
    text = screen_text(screen())
    assert "\x1b" not in text
    assert "?[2J[bold]?" in text
