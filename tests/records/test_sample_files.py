from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from multinode.records.sample_files import EvenStretches, read_lines, read_tail

STEPS = 40_000
# Of what is recorded below, so that a stretch has as few steps as it may.
PART_BYTES = 600_000


def record(kind: str, **fields: object) -> bytes:
    return json.dumps({"schema": 1, "kind": kind, "rank": 0, **fields}).encode() + b"\n"


def step(number: int, more: bytes = b"") -> bytes:
    return b'{"schema": 1, "kind": "step", "rank": 0, "total_steps": 9, "mono_ns": 7%b, "step": %d}\n' % (more, number)


def written(path: Path, lines: Iterable[bytes]) -> Path:
    path.write_bytes(b"".join(lines))
    return path


def read(stretches: EvenStretches, path: Path) -> list[dict[str, Any]]:
    """What is read, none of it torn."""
    return [json.loads(line) for line in stretches.lines(path)]


def numbers(records: Iterable[dict[str, Any]], kind: str = "step") -> list[int]:
    return [one["step"] for one in records if one["kind"] == kind]


def test_lines_between_two_offsets_are_those_that_begin_there(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [b"one\n", b"two\n", b"three"])
    assert list(read_lines(path)) == [(0, b"one\n"), (4, b"two\n"), (8, b"three")]
    assert list(read_lines(path, 4, 8)) == [(4, b"two\n")]
    assert list(read_lines(path, 5)) == [(8, b"three")]
    assert list(read_lines(path, 1, 4)) == []
    assert list(read_tail(path, 6)) == [b"three"]
    assert list(read_tail(path, 100)) == [b"one\n", b"two\n", b"three"]


def test_the_same_steps_are_read_of_workers_whose_records_are_unlike(tmp_path: Path) -> None:
    """One records more from step to step, and one ended early."""
    paths = [
        written(
            tmp_path / "rank-0.jsonl", (step(n, b', "note": "%b"' % (b"x" * (n // 100))) for n in range(1, STEPS + 1))
        ),
        written(tmp_path / "rank-1.jsonl", (step(n) for n in range(1, STEPS + 1))),
        written(tmp_path / "rank-2.jsonl", (step(n) for n in range(1, STEPS // 2))),
    ]
    stretches = EvenStretches(paths, PART_BYTES)
    first, second, ended = (numbers(read(stretches, path)) for path in paths)
    assert stretches.recorded == STEPS
    assert first == second == sorted(first)
    assert ended == [number for number in first if number < STEPS // 2]
    assert (first[0], first[-1]) == (1, STEPS)
    begins = [here for before, here in itertools.pairwise(first) if here != before + 1]
    # The last steps are read, too.
    *apart, _ = (here - before for before, here in itertools.pairwise(begins))
    assert len(apart) > 5
    assert len(set(apart)) == 1
    size = sum(path.stat().st_size for path in paths)
    assert len(first) / STEPS == pytest.approx(PART_BYTES / size, rel=0.2)


def test_what_is_told_before_a_steps_own_record_is_read_with_it(tmp_path: Path) -> None:
    path = written(tmp_path / "r.jsonl", (b'{"kind": "ddp", "step": %d}\n' % n + step(n) for n in range(1, STEPS + 1)))
    records = read(EvenStretches([path], PART_BYTES), path)
    assert numbers(records) == numbers(records, "ddp")


def test_of_a_worker_that_began_anew_the_steps_of_the_last_training_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    model = [record("model", parameters=1), record("group", group="0")]
    again = [step(n, b', "again": 1') for n in range(1, STEPS + 1)]
    for earlier in (STEPS // 2, STEPS, 300):
        written(path, [*model, *(step(n) for n in range(1, earlier + 1)), record("model", parameters=2), *again])
        stretches = EvenStretches([path], PART_BYTES)
        records = read(stretches, path)
        assert stretches.recorded == STEPS, earlier
        begun = numbers(one for one in records if "again" not in one)
        ours = numbers(one for one in records if "again" in one)
        assert numbers(records) == begun + ours
        assert (begun[0], ours[0], ours[-1]) == (1, 1, STEPS)
        # Not every step of the earlier training that has such a number.
        assert len(begun) <= len(ours) < STEPS / 3
        assert [one["parameters"] for one in records if one["kind"] == "model"] == [1, 2]


def test_what_a_step_called_is_read_wherever_it_is_told(tmp_path: Path) -> None:
    told_at = STEPS // 2 + 777

    def lines() -> Iterable[bytes]:
        for number in range(1, STEPS + 1):
            if number in {1, told_at}:
                yield record("traffic", traffic=int(number > 1), calls=[])
            yield step(number, b', "traffic": %d' % (number >= told_at))

    path = written(tmp_path / "r.jsonl", lines())
    records = read(EvenStretches([path], PART_BYTES), path)
    assert told_at not in numbers(records)
    assert [one["traffic"] for one in records if one["kind"] == "traffic"] == [0, 1]


def test_what_is_rare_is_read_at_both_ends(tmp_path: Path) -> None:
    """The loss that was logged last, in none of the stretches."""
    lines = [step(n) + (record("loss", step=n, loss=1.0) if n % 350 == 0 else b"") for n in range(1, STEPS + 1)]
    path = written(tmp_path / "r.jsonl", [*lines, record("train_end", time_s=1.0)])
    records = read(EvenStretches([path], PART_BYTES), path)
    losses = numbers(records, "loss")
    assert (losses[0], losses[-1]) == (350, STEPS // 350 * 350)
    assert records[-1]["kind"] == "train_end"
    assert len(set(losses)) == len(losses)


def test_of_records_that_are_as_many_as_steps_the_first_and_the_last_are_read(tmp_path: Path) -> None:
    more = "x" * 300
    lines = [step(n) + record("loss", step=n, loss=1.0, more=more) for n in range(1, STEPS + 1)]
    lines[STEPS // 2] += record("traffic", traffic=7, calls=[])
    path = written(tmp_path / "r.jsonl", lines)
    records = read(EvenStretches([path], PART_BYTES), path)
    assert [one["traffic"] for one in records if one["kind"] == "traffic"] == [7]
    losses = numbers(records, "loss")
    assert losses == sorted(set(losses))
    assert (losses[0], losses[-1]) == (1, STEPS)
    assert len(losses) < STEPS / 4


def test_of_a_run_without_steps_as_much_is_read(tmp_path: Path) -> None:
    count = 100_000
    path = written(tmp_path / "sampler.jsonl", (b'{"kind": "nic", "at": %d}\n' % n for n in range(count)))
    at = [one["at"] for one in read(EvenStretches([path], PART_BYTES), path)]
    assert (at[0], at[-1]) == (0, count - 1)
    assert len(at) / count == pytest.approx(PART_BYTES / path.stat().st_size, rel=0.2)


def test_a_file_without_steps_is_read_all_along(tmp_path: Path) -> None:
    steps = written(tmp_path / "rank-0.jsonl", (step(n) for n in range(1, STEPS + 1)))
    count = 100_000
    nics = written(tmp_path / "sampler.jsonl", (b'{"kind": "nic", "at": %d}\n' % n for n in range(count)))
    small = written(tmp_path / "kernel.jsonl", [record("kernel", at=1)])
    stretches = EvenStretches([steps, nics, small], PART_BYTES)
    at = [one["at"] for one in read(stretches, nics)]
    assert (at[0], at[-1]) == (0, count - 1)
    assert at == sorted(set(at))
    assert len(at) < count / 2
    assert max(after - before for before, after in itertools.pairwise(at)) < count / 3
    assert len(read(stretches, small)) == 1
