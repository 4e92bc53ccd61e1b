from __future__ import annotations

import msgspec
import pytest
from plotly.graph_objects import Figure

from multinode.contrast.charts import bandwidth_chart, scaling_chart, step_chart
from multinode.contrast.side import load_contrast
from multinode.findings.finding import Finding
from multinode.predict.break_even import Needed
from multinode.predict.forecast import Forecast
from multinode.results.run_page import run_page
from multinode.runs.stored_run import StoredRun
from multinode.stats.unknown import UNMEASURED
from tests import make
from tests.contrast.contrasts import CONTRAST, CONTRAST_RUN, CURVE
from tests.profile.observing import RUN, SUMMARY, observed


def page(run: StoredRun) -> str:
    """What follows the library of charts."""
    return run_page([run]).split("<body>")[1]


def traces(chart: Figure | None) -> dict[str, tuple[list[object], list[object]]]:
    assert chart is not None
    return {trace.name: (list(trace.x), list(trace.y)) for trace in chart.data}


def test_a_contrast_s_section_shows_it_and_not_that_nothing_was_recorded() -> None:
    text = page(make.stored_run(CONTRAST_RUN, {load_contrast: CONTRAST}))
    assert "Nothing was recorded" not in text
    order = [text.index(CONTRAST.verdict.message), text.index('class="tiles"'), text.index("<h2>why</h2>")]
    order += [text.index(f"<h2>{title}</h2>") for title in ("where a step goes", "throughput over bandwidth")]
    order += [text.index(f"<h2>{title}</h2>") for title in ("side by side", "time, cost and energy", "what if")]
    assert order == sorted(order)
    assert "--grad-compress fp16" in text
    assert "the nodes have no GPU" in text


def test_a_contrast_that_cannot_be_read_says_so_and_why() -> None:
    text = page(make.stored_run(CONTRAST_RUN, {load_contrast: Finding(message="This contrast is of another release")}))
    assert "This contrast is of another release" in text
    assert "Nothing was recorded" not in text


def test_costs_and_energy_have_a_table_only_where_they_are_known() -> None:
    unknown = dict.fromkeys(("price_per_hour", "whole_s", "whole_cost", "cost_per_million_tokens"), UNMEASURED)
    bare = [msgspec.structs.replace(one, **unknown) for one in (CONTRAST.baseline, CONTRAST.candidate)]
    contrast = msgspec.structs.replace(CONTRAST, baseline=bare[0], candidate=bare[1])
    assert "time, cost and energy" not in page(make.stored_run(CONTRAST_RUN, {load_contrast: contrast}))
    watts = msgspec.structs.replace(bare[1], power_w=412.4, energy_j_per_sample=17.25)
    text = page(make.stored_run(CONTRAST_RUN, {load_contrast: msgspec.structs.replace(contrast, candidate=watts)}))
    assert "<td>-</td><td>412</td>" in text
    assert "<td>-</td><td>17.2</td>" in text


def test_a_contrast_beside_a_run_is_in_the_overview() -> None:
    text = run_page(
        [
            make.stored_run(CONTRAST_RUN, {load_contrast: CONTRAST}),
            make.stored_run(RUN, summary=SUMMARY, observed=observed()),
        ]
    )
    overview = text.split("<body>")[1].split('<section class="run"')[0]
    assert "<th>speed-up</th><th>efficiency</th>" in overview
    assert "<td>0.124</td><td>12%</td>" in overview


def test_the_step_of_every_side_is_stacked_of_its_parts() -> None:
    drawn = traces(step_chart(CURVE))
    exposed, sides = drawn["exposed communication"]
    assert sides == ["4 nodes<br>4 x 2", "2 nodes<br>2 x 2", "1 node<br>1 x 2"]
    assert exposed == [1764.0, 1176.0, 0.0]
    assert list(drawn) == ["compute", "exposed communication", "straggler wait", "data", "optimizer", "host"]
    unsplit = msgspec.structs.replace(CONTRAST.baseline, split=UNMEASURED)
    some = traces(step_chart(msgspec.structs.replace(CONTRAST, baseline=unsplit)))
    assert some["compute"][1] == ["2 nodes<br>2 x 1"]


def test_the_scaling_curve_has_its_spread_beside_ideal_scaling() -> None:
    chart = scaling_chart(CURVE)
    drawn = traces(chart)
    assert drawn["ideal scaling"][0] == drawn["measured"][0] == [1, 2, 4]
    assert drawn["ideal scaling"][1] == pytest.approx([24.1, 48.2, 96.4])
    assert drawn["measured"][1] == pytest.approx([24.1, 5.96, 8.26], abs=0.005)
    assert chart is not None
    assert chart.data[1].error_y.array[1] == CURVE.others[0].samples_per_s.high - CURVE.others[0].samples_per_s.value
    assert scaling_chart(CONTRAST) is None


def test_links_are_drawn_of_the_settings_that_were_measured_alone() -> None:
    drawn = traces(bandwidth_chart(CONTRAST))
    links, _ = drawn["2 x 1, predicted"]
    assert links == [0.1, 0.3, 1.0, 2.5, 5.0, 10.0, 25.0, 40.0, 100.0]
    assert drawn["1 x 2, measured"][1] == pytest.approx([24.1, 24.1])
    assert len(drawn["1 x 1, predicted"][1]) == 2
    assert drawn["faster than 1 x 1: 710 Mbit/s (610 to 840 Mbit/s)"][0] == [0.6118, 0.6118, 0.8391, 0.8391]
    assert bandwidth_chart(CURVE) is None


def test_a_forecast_that_marks_no_break_even_and_nothing_measured_is_drawn_without() -> None:
    assert isinstance(CONTRAST.forecast, Forecast)
    scenarios = tuple(msgspec.structs.replace(one, measured=False) for one in CONTRAST.forecast.scenarios)
    forecast = msgspec.structs.replace(CONTRAST.forecast, scenarios=scenarios, break_even=None)
    drawn = traces(bandwidth_chart(msgspec.structs.replace(CONTRAST, forecast=forecast)))
    assert set(drawn) == {"high", "interval", "2 x 1, predicted", "1 x 2, measured", "1 x 1, predicted"}


def test_a_break_even_far_from_the_links_is_told_and_not_drawn() -> None:
    assert isinstance(CONTRAST.forecast, Forecast)
    assert CONTRAST.forecast.break_even is not None
    any_link = msgspec.structs.replace(
        CONTRAST.forecast.break_even, beats_one=Needed(value=1e-4, code="any", message="at any bandwidth", always=True)
    )
    forecast = msgspec.structs.replace(CONTRAST.forecast, break_even=any_link)
    contrast = msgspec.structs.replace(CONTRAST, forecast=forecast)
    assert not any(str(name).startswith("faster than") for name in traces(bandwidth_chart(contrast)))
    assert "<td class=words>at any bandwidth</td>" in page(make.stored_run(CONTRAST_RUN, {load_contrast: contrast}))


def test_nothing_that_a_contrast_says_is_run_by_the_page() -> None:
    attack = "</script><script>alert(1)</script><img src=http://x/y onerror=alert(2)>"
    advice = msgspec.structs.replace(
        CONTRAST.advice[0], name=attack, command=attack, effects=(Finding(message=attack),)
    )
    candidate = msgspec.structs.replace(
        CONTRAST.candidate, node_names=(attack,), disturbances=(Finding(message=attack),)
    )
    contrast = msgspec.structs.replace(
        CONTRAST,
        verdict=Finding(message=attack),
        reasons=(Finding(message=attack),),
        candidate=candidate,
        advice=(advice,),
        scaling=attack,
    )
    text = page(make.stored_run(CONTRAST_RUN, {load_contrast: contrast}))
    assert "<script>alert" not in text
    assert "<img" not in text
