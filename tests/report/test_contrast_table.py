from __future__ import annotations

import io

import msgspec
from rich.console import Console

from multinode.analyse.comparison.contrast_figures import Contrast
from multinode.report.comparison.contrast_table import contrast_lines, contrast_table
from tests.report.contrasts import CONTRAST, CURVE, side


def shown(contrast: Contrast, width: int = 100) -> list[str]:
    """What stands in a terminal of this width."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(contrast_table(contrast))
    assert isinstance(console.file, io.StringIO)
    return [*console.file.getvalue().splitlines(), *"\n".join(contrast_lines(contrast)).splitlines()]


def cells(lines: list[str], name: str) -> list[str]:
    """What stands behind a name."""
    (line,) = (line for line in lines if line.startswith(f"{name}  "))
    return line.removeprefix(name).split("  ")[1:]


def figures(lines: list[str], name: str) -> list[str]:
    return [cell.strip() for cell in cells(lines, name) if cell.strip()]


def test_both_sides_stand_beside_each_other_with_their_spread() -> None:
    lines = shown(CONTRAST)
    assert figures(lines, "samples/s") == ["24.1", "2.98"]
    assert figures(lines, "samples/s, from to") == ["23.6 to 24.6", "2.94 to 3.01"]
    assert figures(lines, "step time (ms)") == ["166.0", "1,342"]
    assert figures(lines, "exposed, of the step") == ["0.0 %", "87.6 %"]
    assert figures(lines, "card sends a step (MB)") == ["-", "14.74"]
    assert figures(lines, "speed-up") == ["-", "0.124"]
    assert figures(lines, "efficiency (same workers)") == ["-", "12 %"]
    assert figures(lines, "global batch (samples)") == ["4", "4"]
    assert figures(lines, "sequence length (tokens)") == ["128", "128"]
    assert figures(lines, "whole job takes") == ["8 min 17 s", "1 h 07 min"]
    assert figures(lines, "box2") == ["12.1", "11.4 to 12.7", "166.5", "98 %"]


def test_the_verdict_its_reasons_and_what_may_have_disturbed_it_stand_below() -> None:
    lines = list(contrast_lines(CONTRAST))
    assert lines[0].startswith("verdict     One node is 8.09 times as fast as 2 nodes")
    assert [line[:12].strip() for line in lines[1:4]] == ["why", "", ""]
    assert any(line.startswith("differs     torch differs") for line in lines)
    assert any(line.startswith("disturbed   candidate: box2: processors") for line in lines)
    assert any("840 Mbit/s" in line for line in lines)
    assert lines[-3:] == [
        "advice      one node: 8.09 times as fast (7.90 to 8.30), predicted",
        "advice      gradient accumulation 4: 2.90 times as fast (2.75 to 3.05), predicted",
        "advice      fp16 gradients: 1.78 times as fast (1.70 to 1.86), predicted",
    ]


def test_advice_has_its_range_and_what_was_measured_is_in_the_verdict_alone() -> None:
    best, *_ = CONTRAST.advice
    lines = list(contrast_lines(CONTRAST))
    assert any(line.startswith(f"advice      {best.name}:") for line in lines)
    known = msgspec.structs.replace(
        CONTRAST, advice=(msgspec.structs.replace(best, measured=True), *CONTRAST.advice[1:])
    )
    assert not any(line.startswith(f"advice      {best.name}:") for line in contrast_lines(known))


def test_what_the_gpus_have_no_room_for_is_not_among_the_best_advice() -> None:
    best, *others = CONTRAST.advice
    unfit = msgspec.structs.replace(CONTRAST, advice=(msgspec.structs.replace(best, fits=False), *others))
    assert [line.split(":")[0] for line in contrast_lines(unfit) if line.startswith("advice")] == [
        "advice      gradient accumulation 4",
        "advice      fp16 gradients",
    ]


def test_a_reason_that_is_the_cause_already_is_not_said_twice() -> None:
    sentence = CONTRAST.loss.sentence
    said = msgspec.structs.replace(CONTRAST, reasons=(f"{sentence[0].upper()}{sentence[1:]}.",))
    assert [sentence in line for line in contrast_lines(CONTRAST)].count(True) == 1
    assert not any(line.startswith("cause") for line in contrast_lines(said))


def test_what_differs_is_marked_and_what_nobody_knows_has_no_row() -> None:
    lines = shown(CURVE)
    assert figures(lines, "global batch (samples) !") == ["4", "8", "16"]
    assert any(line.startswith("! differs between the sides") for line in lines)
    assert figures(shown(CONTRAST), "torch !") == ["2.13.0+cpu", "2.13.1+cpu"]
    assert not any("power" in line or "energy" in line for line in lines)
    free = [msgspec.structs.replace(one, price_per_hour=None) for one in (CONTRAST.baseline, CONTRAST.candidate)]
    unpriced = msgspec.structs.replace(CONTRAST, baseline=free[0], candidate=free[1])
    assert not any("price an hour" in line for line in shown(unpriced))


def test_it_fits_a_hundred_columns_with_many_sides_too_and_cuts_nothing() -> None:
    points = tuple(side("point", nodes, 8, exposed_ms=12345.6, rates=(123.4, 125.6)) for nodes in (2, 4, 8, 16, 32))
    many = msgspec.structs.replace(CURVE, others=points)
    for contrast in (CONTRAST, CURVE, many):
        lines = shown(contrast)
        assert max(map(len, lines)) <= 100
        assert "\u2026" not in "\n".join(lines)
    heads = [line for line in lines if "baseline" in line and "nodes" in line]
    assert " ".join(heads).split().count("candidate") == 1
    assert all(f"{nodes} nodes" in " ".join(heads) for nodes in (2, 4, 8, 16, 32))


def test_a_contrast_of_which_little_is_known_is_shown_all_the_same() -> None:
    bare = [
        msgspec.structs.replace(
            one, settings=None, global_batch=None, versions={}, tokens_per_s=None, tgs=None, split=None,
            exposed_ms=None, exposed_share=None, whole_s=None, whole_cost=None,
        )
        for one in (CONTRAST.baseline, CONTRAST.candidate)
    ]  # fmt: skip
    lines = shown(
        msgspec.structs.replace(
            CONTRAST, baseline=bare[0], candidate=bare[1], each_node=(), forecast=None, advice=(), reasons=()
        )
    )
    assert figures(lines, "samples/s") == ["24.1", "2.98"]
    assert not any("accumulation" in line or "exposed" in line for line in lines)


def test_nothing_that_a_node_says_moves_the_cursor_or_is_taken_for_markup() -> None:
    attack = "\x1b[2J[bold]\u202e"
    lines = shown(msgspec.structs.replace(CONTRAST, verdict=attack, rule=attack, differences=(attack,)))
    assert "?[2J[bold]?" in "\n".join(lines)
    assert "\x1b" not in "\n".join(lines)
