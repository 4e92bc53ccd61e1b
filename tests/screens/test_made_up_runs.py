"""Whole screens and pages of stored runs with figures that no lab has: `scripts/test tests/screens --update-golden`."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from multinode.network.screen import show
from multinode.results.answer import answer_in
from tests.golden import Golden
from tests.network.test_screen import WELL
from tests.predict.stored import comm_ms, sweep_record, training_record
from tests.predict.test_request import launched_record, store
from tests.screens.made_up_runs import NAMES, store_made_up
from tests.screens.screens import page_text, reported_text, screens_text

CONFIGS = Path(__file__).parents[2] / "configs"
FORECASTS = {
    "predict": (
        "predict one two scan --details",
        "predict one",
        "predict one lora scan",
        "predict one two scan --link 10 --strategy ddp,zero1,zero2,zero3 --method full,lora:8",
        "predict one two scan --link 1 --average diloco:64:fp16 --bucket-mib 100 --overlap off",
        "predict --benchmarks two_boxes_lora.yaml --details",
    ),
    "advise": ("advise one two scan --details", "advise two"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stored trainings of one kind and an nccl-test, and published benchmarks."""
    folder = tmp_path_factory.mktemp("trained")
    exposed_ms = comm_ms(1.0)
    for record in (
        sweep_record("scan"),
        launched_record("one", 1),
        launched_record("two", 2, exposed_ms=exposed_ms),
        training_record("lora", 2, exposed_ms=exposed_ms / 10, job={"finetuning_type": "lora", "lora_rank": 8}),
    ):
        store(folder / "runs", record)
    shutil.copy(CONFIGS / "figures" / "two_boxes_lora.yaml", folder)
    return folder


@pytest.mark.parametrize("name", FORECASTS)
def test_what_is_predicted_and_advised(trained: Path, golden: Golden, name: str) -> None:
    golden.check(f"made-up/{name}.txt", screens_text(trained, FORECASTS[name]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made-up")
    store_made_up(folder / "runs")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shown_of_a_run(folder: Path, golden: Golden, name: str) -> None:
    run_id = f"20260101-{name}"
    golden.check(f"made-up/{name}.txt", screens_text(folder, [f"show {run_id}", f"show {run_id} --details"]))


@pytest.mark.parametrize("name", NAMES)
def test_what_the_page_of_a_run_says(folder: Path, golden: Golden, name: str) -> None:
    golden.check(f"made-up/{name}-page.txt", reported_text(folder, f"20260101-{name}"))


def test_the_list_of_runs(folder: Path, golden: Golden) -> None:
    golden.check("made-up/runs.txt", screens_text(folder, ["runs", "runs --all"]))


@pytest.mark.parametrize("names", [("launch", "failed", "contrast", "scan"), ("sweep", "table")], ids="-".join)
def test_what_the_page_of_several_runs_says(folder: Path, golden: Golden, names: tuple[str, ...]) -> None:
    text = reported_text(folder, *(f"20260101-{name}" for name in names))
    golden.check(f"made-up/{'-'.join(names)}-page.txt", text)


def test_a_run_as_markdown(folder: Path, golden: Golden) -> None:
    commands = [
        f"report 20260101-{name} --format markdown" for name in ("launch", "contrast", "sweep", "bench", "scan")
    ]
    golden.check("made-up/markdown.txt", screens_text(folder, commands))


def test_tables_side_by_side(folder: Path, golden: Golden) -> None:
    commands = [
        "show 20260101-sweep 20260101-table",
        "show 20260101-sweep --sort -samples_per_s --where nodes=1",
        "show 20260101-table --baseline 16 --format csv",
    ]
    golden.check("made-up/tables.txt", screens_text(folder, commands))


def test_what_the_page_of_an_nccl_test_says_that_its_own_verb_writes(golden: Golden) -> None:
    golden.check("made-up/scan-own-page.txt", page_text(answer_in("html", WELL.run_id, show(WELL), WELL)))
