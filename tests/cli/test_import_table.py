from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from multinode.cli import runs, table
from tests.golden import Golden, error_of

FIGURES = Path(__file__).parents[2] / "configs" / "figures"
TABLES = Path(__file__).parents[1] / "tables" / "cases"


@pytest.fixture(autouse=True)
def _root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTINODE_RUNS", str(tmp_path / "runs"))


def run(*arguments: str | Path) -> Result:
    app = typer.Typer()
    table.register(app)
    runs.register(app)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_the_published_tables_are_imported_and_what_contradicts_itself_is_named(golden: Golden) -> None:
    result = run("import", FIGURES / "published_gpus.yaml", "--prices", FIGURES / "gpu_prices.yaml")
    (run_id,) = {one["run_id"] for one in json.loads(run("runs", "--json").stdout)["runs"]}
    golden.check("import.txt", result.stdout.replace(run_id, "RUN"))
    details = run("show", "last", "--details").stdout.replace(run_id, "RUN")
    golden.check("import_details.txt", re.sub(r"(Began +).*", r"\1WHEN", details))
    assert "results: " in result.stderr


def test_the_document_is_the_table() -> None:
    document = json.loads(run("import", FIGURES / "published_batches.csv", "--name", "Batches", "--json").stdout)
    assert (document["schema"], document["job"]) == ("multinode.sweep/3", "Batches")
    assert [cell["source"] for cell in document["cells"]] == ["imported"] * 12
    assert document["cells"][0]["samples_per_s"]["value"] == 20.108
    assert document["cells"][0]["price_per_hour"]["reason"]


def test_an_import_stands_among_the_runs_and_is_shown() -> None:
    run("import", FIGURES / "published_batches.csv")
    assert json.loads(run("runs", "--json").stdout)["runs"][0]["kind"] == "import"
    shown = json.loads(run("show", "last", "--json").stdout)
    assert len(shown["sweep"]["cells"]) == 12
    assert "A100_1gpu_8-fp16" in run("show", "last").stdout


def test_options_hold_for_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("gpus,samples/s,loss\n1,2.50,x\n")
    words = ["--default", "samples=100", "--default", "epochs=2", "--ignore", "loss", "--json"]
    (cell,) = json.loads(run("import", path, *words).stdout)["cells"]
    assert cell["whole_s"]["value"] == pytest.approx(80)


def test_titles_are_told_apart_by_the_user_or_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("gpus,Speed=1,loss\n8,2.50,x\n")
    (cell,) = json.loads(run("import", path, "--column", "Speed=1=tok/s", "--skip-unknown", "--json").stdout)["cells"]
    assert cell["tokens_per_s"]["value"] == 2.5


def test_seconds_a_step_of_more_nodes_are_compared_the_right_way() -> None:
    one, two = json.loads(run("import", TABLES / "sit.csv", "--json").stdout)["cells"]
    assert one["samples_per_s"]["value"] == pytest.approx(2 * 1 * 2 / 2.46)
    assert two["relative"]["value"] == pytest.approx((4 * 2 / 8.68) / (2 * 2 / 2.46))


def test_speeds_of_one_worker_are_those_of_all_times_their_number() -> None:
    cells = json.loads(run("import", TABLES / "zh.csv", "--json").stdout)["cells"]
    assert [cell["tokens_per_s"].get("value") for cell in cells] == [14800, 14400, None]


def test_a_table_that_we_wrote_is_read(tmp_path: Path) -> None:
    run("import", FIGURES / "published_gpus.yaml")
    ours = json.loads(run("show", "last", "--json").stdout)["sweep"]["cells"]
    path = tmp_path / "a.md"
    run("show", "last", "-o", path)
    cells = json.loads(run("import", path, "--json").stdout)["cells"]
    assert [cell["label"] for cell in cells] == [cell["label"] for cell in ours]
    assert [cell["state"] for cell in cells] == [cell["state"] for cell in ours]
    assert [cell["world_size"] for cell in cells] == [cell["world_size"] for cell in ours]


def test_a_wrong_option_is_one_line(golden: Golden) -> None:
    every = (
        "--column loss",
        "--default samples",
        "--default =1",
        "--default epochs=1 --default epochs=2",
        "--prices none.yaml",
    )
    table = FIGURES / "published_batches.csv"
    unknown = error_of(run, "import", table, "--default", "sample=1")
    assert unknown.message == f"{table}: unknown column 'sample' (nearest: samples)"
    golden.check_errors("refused_import", {words: error_of(run, "import", table, *words.split()) for words in every})


@pytest.mark.parametrize("text", ["model,gpus,samples/s\n=1+1,1,2.5\n", "name,gpus,samples/s\n[red]x[/red],1,2.5\n"])
def test_words_of_strangers_are_shown_as_words(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    run("import", path)
    assert text.splitlines()[1].split(",")[0] in run("show", "last", "--details").stdout


PARTS = "gpu,nodes,gpus per node,strategy,precision,batch,network,samples/s"
SLOW = "H100,1,8,FSDP,bf16,2,8x400G InfiniBand,10.0\nH100,4,8,FSDP,bf16,2,8x400G InfiniBand,9.00\n"


def test_several_nodes_that_are_slower_than_their_link_allows_are_named_everywhere(tmp_path: Path) -> None:
    path, ours = tmp_path / "a.csv", tmp_path / "ours.md"
    path.write_text(f"{PARTS}\n{SLOW}")
    said = (
        "h100-nodes4, 4.4x slower than 3,200 Gbit/s over RDMA allows; the measured speed corresponds to a link of "
        "about "
    )
    asks = "Check whether NCCL uses RDMA on every NIC: multinode nccl-test"
    for shown in (run("import", path, "--default", "params=7B"), run("show", "last")):
        text = " ".join(shown.stdout.split())
        assert said in text
        assert asks in text
    alone, slow = json.loads(run("show", "last", "--json").stdout)["sweep"]["cells"]
    assert alone["shortfall"] is None
    assert slow["shortfall"]["figures"]["slower"] == pytest.approx(4.4, rel=0.02)
    assert "4.4x slower than 3,200 Gbit/s over RDMA" in run("show", "last", "--format", "csv").stdout
    run("show", "last", "-o", ours)
    assert asks in ours.read_text()


def test_a_link_that_cannot_judge_its_row_says_which_column_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{PARTS}\n{SLOW}")
    assert "Network h100-nodes4 not evaluated: needs the column parameters" in " ".join(
        run("import", path).stdout.split()
    )
    assert "needs the column parameters" in run("show", "last", "--details").stdout
