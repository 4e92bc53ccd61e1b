from __future__ import annotations

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.predict.evidence import gather
from multinode.predict.forecast import Forecast, ForecastRequest, make_forecast
from multinode.predict.screen import break_even_sheet, forecast_notes, forecast_sheet, rows_words, what_if_sheet
from tests.golden import Golden, screen_of
from tests.levers.compressed import compressed, compressions
from tests.predict.stored import comm_ms, sweep_record, training_record

EVIDENCE = gather(
    [training_record("one", 1), training_record("two", 2, exposed_ms=comm_ms(1.0)), sweep_record("sweep")],
    [training_record("slow", 2, 0.1, exposed_ms=comm_ms(0.1))],
)


def forecast(request: ForecastRequest) -> Forecast:
    return make_forecast(EVIDENCE, request)


def shown(found: Forecast, width: int = 100) -> str:
    return screen_of([forecast_sheet(found)], width)


def test_a_setting_that_varies_is_a_column_and_one_that_does_not_is_in_the_title(golden: Golden) -> None:
    """What was measured is marked."""
    golden.check_answer("sheet_links", [forecast_sheet(forecast(ForecastRequest(links=(0.1, 1.0))))], widths=(120, 160))
    varied = ForecastRequest(links=(1.0,), accumulations=(1, 4), levers=compressions(None, "fp16"))
    golden.check_answer("sheet_settings", [forecast_sheet(forecast(varied))], widths=(120, 160))


def test_figures_are_those_of_the_scenarios() -> None:
    found = forecast(ForecastRequest(links=(0.1,), nodes=(1, 2)))
    one, two = found.scenarios
    text = shown(found)
    assert f"{two.step_time_ms:,.0f}" in text
    assert f"{two.samples_per_s.low:.2f}-{two.samples_per_s.high:.2f}" in text
    assert f"{two.efficiency:.0%}" in text
    assert f"{one.samples_per_s.value:.1f}" in text


def test_it_fits_a_terminal_of_eighty_columns() -> None:
    assert all(len(line) <= 80 for line in shown(forecast(ForecastRequest()), 80).splitlines())
    assert "..." not in shown(forecast(ForecastRequest()), 80)


def test_the_break_even_the_error_and_where_the_figures_are_from_are_said(golden: Golden) -> None:
    found = forecast(ForecastRequest(links=(0.1, 100.0)))
    golden.check_answer("sheet_break_even", [break_even_sheet(found)])
    golden.check("notes.txt", "".join(f"{note}\n" for note in forecast_notes(found)))


def test_among_other_tables_it_has_no_more_rows_than_one_reads_and_its_notes(golden: Golden) -> None:
    found = forecast(ForecastRequest(links=(0.1, 1.0), accumulations=tuple(range(1, 41))))
    sheet = what_if_sheet(found)
    assert len(sheet.rows) == 60
    golden.check("what_if_notes.txt", "".join(f"{note}\n" for note in sheet.notes))
    assert set(forecast_notes(found)) < set(sheet.notes)


def test_what_a_job_is_called_cannot_draw_on_the_terminal() -> None:
    found = forecast(ForecastRequest(links=(1.0,)))
    rude = "\x1b[2J[b]x"
    evil = msgspec.structs.replace(found.scenarios[0], method=rude, levers=compressed(rude), strategy=rude)
    # Alone they stand in the title; beside others in columns.
    for rows in ((evil,), (evil, found.scenarios[0])):
        odd = msgspec.structs.replace(found, scenarios=rows, notes=(Finding(message="\x1b]0;x\x07"),))
        text = shown(odd, 200)
        assert "\x1b" not in text
        assert "[b]x" in text, "the name is shown, and is no markup"


def test_rows_beyond_what_the_back_test_has_seen_are_counted() -> None:
    """Twelve stored runs on slow links justify an interval there; what might hide at 1 Gbit/s they have not seen."""
    others = [
        training_record(f"other-{one}", 2, link, exposed_ms=comm_ms(link) * (1 + one / 100))
        for one, link in enumerate((0.1, 0.2, 0.3, 0.5) * 3)
    ]
    named = [training_record("one", 1), sweep_record("sweep")]
    found = make_forecast(gather(named, others), ForecastRequest(links=(0.3, 1.0)))
    quantile = found.back_test.quantile
    assert quantile is not None
    assert quantile.runs == 12
    near, far = found.scenarios
    assert (near.basis, far.basis) == ("back-test", "assumed")
    assert near.samples_per_s.high / near.samples_per_s.value == pytest.approx(1 + quantile.relative)
    assert far.samples_per_s.high / far.samples_per_s.value > 1 + quantile.relative
    told = f"intervals: 90%, from the residuals of 12 runs, up to {quantile.relative:.1%} off"
    beyond = "for 1 row outside the tested range, assumed to be at least as wide"
    assert f"{told}; {beyond}" in list(forecast_notes(found))


def test_rows_of_fewer_workers_than_the_break_even_say_so() -> None:
    found = forecast(ForecastRequest())
    assert rows_words(found) == ""
    assert found.break_even is not None
    of_two = msgspec.structs.replace(found.break_even, one_node_workers=2, full_beats_one=found.break_even.beats_one)
    told = rows_words(msgspec.structs.replace(found, break_even=of_two))
    assert told == "These rows have 1 worker per node; the break-even is for 2 per node (--workers-per-node)."
