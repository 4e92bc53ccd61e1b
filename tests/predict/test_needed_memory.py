from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from multinode.predict.evidence import Evidence, gather
from multinode.predict.forecast import ForecastRequest, make_forecast
from multinode.predict.needed_memory import worker_peak
from multinode.predict.variants import Subject
from multinode.traffic.step_calls import Strategy
from tests.model.trainings import LLAMA_3_8B, LORA, training_job

from .stored import sweep_record, training_record


def evidence(gpu_gib: float | None, **settings: Any) -> Evidence:
    """A LoRA training of Llama-3-8B with samples of 2,048 tokens, from one node."""
    found = gather([training_record("one", 1), sweep_record("sweep")])
    known = replace(
        found.subject.settings,
        **{"method": "lora", "lora_rank": 8, "precision": "bf16", "sequence_length": 2048, **settings},
    )
    subject = Subject(settings=known, job=training_job(LORA | {"bf16": True}), model=LLAMA_3_8B)
    return replace(found, subject=subject, gpu_gib=gpu_gib)


def test_what_was_asked_for_and_does_not_fit_is_noted_once() -> None:
    asked = ForecastRequest(links=(1.0, 10.0), nodes=(2,), per_device_batches=(1.0, 8.0), methods=("lora:8",))
    before = make_forecast(evidence(None), asked).notes
    (note,) = (note for note in make_forecast(evidence(24.0), asked).notes if note not in before)
    assert note.message.startswith("DDP, lora:8, batch 8 on 2 workers does not fit: a worker needs about ")
    assert note.message.endswith("but the smallest GPU has 24 GiB")
    assert (note.figures["settings"], note.figures["gpu_gib"]) == ("DDP, lora:8, batch 8 on 2 workers", 24)
    assert make_forecast(evidence(80.0), asked).notes == before


def test_another_method_needs_its_own_memory() -> None:
    asked = ForecastRequest(links=(1.0,), nodes=(2,), methods=("full", "lora:8"), per_device_batches=(1.0,))
    notes = make_forecast(evidence(40.0), asked).notes
    assert [note.figures["settings"] for note in notes if note.code == "does-not-fit"] == [
        "DDP, full, batch 1 on 2 workers"
    ]


def test_without_the_widths_or_the_length_nothing_is_known() -> None:
    found = evidence(24.0)
    load, scenario = found.calibration.work.load, replace(found.today, strategy=Strategy.DDP)
    settings = found.subject.settings
    assert worker_peak(found.subject, settings, scenario, load) is not None
    assert worker_peak(found.subject, replace(settings, sequence_length=None), scenario, load) is None
    assert worker_peak(Subject(settings=settings), settings, scenario, load) is None
