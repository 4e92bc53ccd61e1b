from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.traffic.step_calls import Strategy
from tests.golden import Golden, error_of
from tests.predict.stored import comm_ms, sweep_record, training_record
from tests.predict.test_request import store

SEED = Path(__file__).parent.parent.parent / "configs" / "figures" / "two_boxes_lora.yaml"
CLOUD = Path(__file__).parent.parent / "predict" / "published_pairs" / "p3-roberta-25g.yaml"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "runs"
    monkeypatch.setenv("MULTINODE_RUNS", str(root))
    store(root, sweep_record("a-sweep"))
    store(root, training_record("b-one", 1))
    store(root, training_record("b-two", 2, exposed_ms=comm_ms(1.0)))
    return root


def predict(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["predict", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: str) -> Any:
    return json.loads(predict(*arguments, "--json"))


def test_the_document_has_what_was_asked_for() -> None:
    found = document("b-one", "b-two", "a-sweep", "--link", "100mbit,1gbit,10", "--nodes", "2,4")
    assert found["schema"] == "multinode.predict/3"
    assert [(one["nodes"], one["link_gbit_per_s"]) for one in found["scenarios"]] == [
        (2, 0.1),
        (2, 1.0),
        (2, 10.0),
        (4, 0.1),
        (4, 1.0),
        (4, 10.0),
    ]
    for one in found["scenarios"]:
        rate = one["samples_per_s"]
        assert rate["low"] <= rate["value"] <= rate["high"]
        assert one["step_time_ms"] > 0
    assert found["break_even"]["efficient"]["value"] > 1
    tested = found["back_test"]["outcome"]
    assert (tested["code"], tested["figures"]["runs"]) == ("checked", 1)


def test_every_axis_reaches_its_scenarios() -> None:
    found = document(
        *("b-one", "a-sweep", "--link", "1", "--batch", "4", "--accumulation", "2", "--workers-per-node", "2"),
        *("--strategy", "zero2", "--method", "lora:8", "--bucket-mib", "10", "--overlap", "on"),
    )
    (one,) = found["scenarios"]
    assert (one["per_device_batch"], one["accumulation"], one["workers_per_node"]) == (4.0, 2, 2)
    assert (one["strategy"], one["method"], one["bucket_mib"], one["overlap"]) == ("ZeRO-2", "lora:8", 10.0, True)
    (none, half) = document("b-one", "a-sweep", "--link", "1", "--grad-compress", "none,bf16")["scenarios"]
    assert (none["levers"], half["levers"]) == ({}, {"compression": {"kind": "bf16"}})
    rounds = document(
        *(
            "b-one",
            "a-sweep",
            "--link",
            "1",
            "--average",
            "none,local:16,local:16:fp16,diloco:64,diloco:64:0.7:0.9:fp16",
        )
    )["scenarios"]
    averagings = [one["levers"].get("averaging", {}) for one in rounds]
    every = [(each.get("every"), each.get("dtype"), each.get("outer_lr")) for each in averagings]
    assert every == [(None, None, None), (16, None, None), (16, "fp16", None), (64, None, 0.7), (64, "fp16", 0.7)]


def test_every_strategy_that_the_model_has_can_be_asked_for() -> None:
    words = ",".join(strategy.option for strategy in Strategy)
    found = document("b-one", "a-sweep", "--link", "1", "--strategy", words)
    assert [one["strategy"] for one in found["scenarios"]] == [str(one) for one in Strategy]


def test_the_newest_run_is_meant_where_none_is_named() -> None:
    newest, named = (document(*runs, "--link", "1")["scenarios"] for runs in ((), ("b-two",)))
    assert newest == named


def test_published_figures_stand_in_the_place_of_runs(golden: Golden) -> None:
    """Nothing is next: there is no run whose settings could be changed."""
    golden.check(
        "predict_published.txt", predict("--benchmarks", str(SEED), "--link", "0.85").replace(str(SEED), "SEED")
    )


def test_what_cannot_be_is_refused_by_its_option(golden: Golden) -> None:
    lines = (
        *(
            "--link 0",
            "--link 1,x",
            "--link ''",
            "--nodes many",
            "--batch -2",
            "--accumulation 0",
            "--accumulation 1.5",
        ),
        *("--average local:0", "--average none,often", "--strategy zero9", "--overlap maybe", "--target 2"),
        *("--link-measured -1", "--method lora:1" + 9 * "0", "b-one a-sweep --stream 0"),
        *("b-one --benchmarks SEED", "--benchmarks SEED --link-measured 10"),
    )
    golden.check_errors(
        "refused_predict",
        {line: error_of(predict, *shlex.split(line.replace("SEED", str(SEED)))) for line in lines},
        SEED.parent,
    )
    # More digits than an int of Python takes from a text.
    error_of(predict, "--method", "lora:1" + 5000 * "0")


def test_a_measured_stream_counts_over_the_rate_and_over_what_figures_tell() -> None:
    rated = document("b-one", "a-sweep", "--link", "10")["scenarios"][0]
    (shared,) = document("b-one", "a-sweep", "--link", "10", "--stream", "0.3")["scenarios"]
    # The sweep's own calls took what its link carried: how that goes on at 10 Gbit/s is what the stream doubts.
    assert shared["samples_per_s"]["high"] == pytest.approx(rated["samples_per_s"]["high"], rel=0.03)
    assert shared["samples_per_s"]["low"] < 0.8 * rated["samples_per_s"]["low"]
    told, measured = (
        document("--benchmarks", str(CLOUD), "--link", "25", *more) for more in ((), ("--stream", "5gbit"))
    )
    comm_ms = [each["scenarios"][0]["parts"]["comm_ms"] for each in (told, measured)]
    # 2.94 GB/s is what 25 Gbit/s carry.
    assert comm_ms[1] == pytest.approx(comm_ms[0] * 2.942 / 0.625, rel=0.01)
    assert [bool(each["measure"]) for each in (told, measured)] == [True, False]


@pytest.mark.parametrize(
    ("ending", "wanted"),
    [
        ("md", "| nodes | link | workers |"),
        ("csv", "\nforecast,break-even,2,90% scaling efficiency,,"),
        ("html", "<h2>break-even</h2>"),
        ("json", '"schema": "multinode.predict/3"'),
    ],
)
@pytest.mark.parametrize("verb", ["predict", "advise"])
def test_a_forecast_and_advice_are_written_in_the_form_of_the_ending(
    tmp_path: Path, verb: str, ending: str, wanted: str
) -> None:
    path = tmp_path / f"answer.{ending}"
    result = CliRunner().invoke(
        build_app(), [verb, "b-one", "b-two", "a-sweep", "-o", str(path)], catch_exceptions=False
    )
    assert result.stdout.strip() == str(path)
    advised = {
        "md": "| change | gain | range | memory (GiB) |",
        "csv": "advice,changes,1,gain,,",
        "html": "<h2>changes</h2>",
        "json": '"schema": "multinode.advise/3"',
    }
    assert (wanted if verb == "predict" else advised[ending]) in path.read_text()
