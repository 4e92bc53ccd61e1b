from __future__ import annotations

import csv
import io

import msgspec
import pytest

from multinode.profile.export import FILES, csv_files
from multinode.profile.observed import observe
from multinode.records.sample_figures import CPU, GPU
from multinode.records.samples import CpuSample, GpuSample
from tests.profile.observing import RUN, STEPS, collective_samples, observed


def rows(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_there_is_a_row_a_worker_and_step_with_all_that_is_known_of_it() -> None:
    steps = rows(csv_files([observed()])["steps.csv"])
    assert len(steps) == 4 * STEPS
    tenth = next(row for row in steps if row["rank"] == "0" and row["step"] == "10")
    assert (tenth["run_id"], tenth["node"], tenth["node_rank"]) == (RUN.run_id, "box1", "0")
    assert float(tenth["step_time_us"]) == pytest.approx(400_400.0)
    assert (tenth["tokens"], tenth["effective_tokens"], tenth["counted"]) == ("2048", "1740", "1")
    assert (tenth["phase_data_us"], tenth["phase_comm_us"]) == ("8250.0", "")
    assert (tenth["ddp_comm_us"], tenth["ddp_overlap_us"]) == ("204000.0", "83500.0")
    assert float(tenth["loss"]) == pytest.approx(2.2)
    assert next(row for row in steps if row["step"] == "1")["counted"] == "0"


def test_counters_are_as_they_were_read_and_the_rates_beside_them() -> None:
    network = rows(csv_files([observed()])["network.csv"])
    assert (network[0]["in_gbit_per_s"], network[0]["ifname"], network[0]["link_gbit_per_s"]) == ("", "ens1f0", "10.0")
    assert network[0]["rx_bytes"] == str(300_000_000 * 1000)
    assert float(network[5]["out_gbit_per_s"]) == pytest.approx(2.56)


def test_gpus_processors_and_calls_have_a_file_each() -> None:
    files = csv_files([observed()])
    gpu = rows(files["gpus.csv"])[-1]
    assert (gpu["node"], gpu["index"], gpu["power_w"], gpu["throttle"]) == ("box2", "6", "311.0", "sw_power_cap")
    cpu = rows(files["cpu.csv"])[-1]
    assert (cpu["job_cores"], cpu["tcp_sent_segments"]) == ("3.5", "1018000")
    (call, *_) = rows(files["calls.csv"])
    assert (call["op"], call["count"], call["backend"], call["group_ranks"]) == ("all_reduce", "3", "nccl", "0 1 2 3")


def test_every_field_of_a_gpu_s_and_a_processor_s_sample_is_a_column() -> None:
    assert [figure.name for figure in GPU] == list(GpuSample.__struct_fields__)
    assert [figure.name for figure in CPU] == list(CpuSample.__struct_fields__)


def test_a_collective_test_has_a_row_an_iteration() -> None:
    seen = observed()
    measured = msgspec.structs.replace(seen.nodes[0], samples=tuple(collective_samples()))
    found = rows(csv_files([observe("t", [measured])])["collectives.csv"])
    assert [(row["size_bytes"], row["iteration"], row["time_us"]) for row in found] == [
        ("1024", "1", "100.0"),
        ("1024", "2", "110.5"),
        ("4096", "1", "100.0"),
        ("4096", "2", "110.5"),
    ]


def test_every_file_is_there_with_its_header_even_where_nothing_was_recorded() -> None:
    files = csv_files([])
    assert tuple(files) == FILES
    for text in files.values():
        assert text.startswith("run_id,node,node_rank,")
        assert rows(text) == []


def test_several_runs_stand_below_each_other() -> None:
    other = msgspec.structs.replace(observed(), run_id="other")
    steps = rows(csv_files([observed(), other])["steps.csv"])
    assert [row["run_id"] for row in steps] == [RUN.run_id] * (4 * STEPS) + ["other"] * (4 * STEPS)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+x", "'+x"),
        ("-x", "'-x"),
        ("@x", "'@x"),
        ("\t=1", "' =1"),
        ("\n=1", "' =1"),
        ("\r=1", "?=1"),
        ("box-1", "box-1"),
    ],
)
def test_a_name_that_a_spreadsheet_would_calculate_is_told_to_be_text(name: str, cell: str) -> None:
    seen = observed()
    named = msgspec.structs.replace(seen, nodes=(msgspec.structs.replace(seen.nodes[0], name=name),))
    assert {row["node"] for row in rows(csv_files([named])["network.csv"])} == {cell}


def test_a_negative_number_stays_a_number() -> None:
    seen = observed()
    assert "'-" not in "".join(csv_files([seen]).values())
    assert any(float(row["loss"] or 0) > 0 for row in rows(csv_files([seen])["steps.csv"]))
