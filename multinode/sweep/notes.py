"""The notes under a table of cells: what its full run trains, what cannot be compared, where its prices come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.findings.finding import Finding, distinct
from multinode.findings.rule import RuleGroup
from multinode.stats.unknown import Unknown, or_none
from multinode.sweep.comparability import currencies, differing, list_currencies, other_work
from multinode.sweep.figures import CellRow, CellTable, has_speed
from multinode.units import format_count

OWN = RuleGroup("Notes on a sweep or an import")
FROM_ROWS = RuleGroup("Notes that follow from the rows of a table")
FROM_PRICES = RuleGroup("Notes on the prices of a table")

FULL_RUN_OF_STEPS = OWN.rule(
    "full-run-of-steps",
    about="the full run, if its length is given in steps",
    message="In every cell, the full run has {samples:,} samples ({steps:,} steps of {batch:,} samples per worker on "
    "{workers:,} workers). Its time is calculated from the speed of the measured steps.",
    figures=("samples", "steps", "batch", "workers"),
)
FULL_RUN_OF_EPOCHS = OWN.rule(
    "full-run-of-epochs",
    about="the full run, if its length is given in epochs",
    message=(
        "The full run has {times} of the dataset{size}. Its time is calculated from the speed of the measured steps."
    ),
    figures=("epochs",),
)
IGNORED_COLUMNS = OWN.rule(
    "ignored-columns",
    about="columns of an imported table that were ignored on request",
    message="Ignored columns: {names}.",
    figures=("names",),
)
LABEL_COLUMNS = OWN.rule(
    "label-columns",
    about="text columns with unknown titles, which label the rows of an imported table",
    message="multinode uses these text columns with unknown titles as row labels: {names}.",
    figures=("names",),
)
NO_ROW = OWN.rule(
    "no-row",
    about="no row of the table matches the conditions of --where",
    message="None of the {rows:,} rows matches {conditions}.",
    figures=("rows", "conditions"),
)

BATCH_TERMS = FROM_ROWS.rule(
    "batch-terms",
    about="names of batch, accumulation and global batch in other projects",
    message="Batch is per_device_train_batch_size in Hugging Face and train_micro_batch_size_per_gpu in DeepSpeed. "
    "Accumulation is gradient_accumulation_steps in both. Global batch is batch x accumulation x workers: the total "
    "train batch size in Hugging Face, and train_batch_size in DeepSpeed.",
)
OTHER_WORK = FROM_ROWS.rule(
    "other-work",
    about="rows whose samples/s cannot be compared, because their samples differ in size",
    message="The rows {work}: {so}.",
)
IMPORTED = FROM_ROWS.rule(
    "imported",
    about="rows of an imported table",
    message="Imported rows were measured elsewhere, with unknown methods.",
)
FEW_EXPOSED = FROM_ROWS.rule(
    "few-exposed",
    about="rows in which exposed communication is known for only some of the measured steps",
    message="In {rows}, exposed communication is known for only some of the measured steps ({label}: {steps}).",
)
CURRENCIES = FROM_ROWS.rule(
    "currencies",
    about="prices in several currencies",
    message="Prices are in {currencies}, so they cannot be compared.",
    figures=("currencies",),
)

FILED_PRICES = FROM_PRICES.rule(
    "filed-prices",
    about="the currency, date and source of the prices file",
    message="Prices in the file are in {currency}{origin}.",
    figures=("currency",),
)
ASSUMED_CURRENCY = FROM_PRICES.rule(
    "assumed-currency",
    about="prices without a currency",
    message="Prices that have no currency in a hostfile or an imported table are taken to be in {currency}.",
    figures=("currency",),
)
UNPRICED = FROM_PRICES.rule(
    "unpriced",
    about="devices without a price in the prices file",
    message="The prices file has no price for {devices}, so cells with these devices have no price.",
    figures=("devices",),
)


def with_notes(table: CellTable) -> CellTable:
    """The table with what its rows give occasion to say behind its own notes."""
    return msgspec.structs.replace(table, notes=distinct((*own_notes(table), *_notes_of(table.cells))))


def own_notes(table: CellTable) -> tuple[Finding, ...]:
    """The notes of a table that do not follow from its rows."""
    return tuple(note for note in table.notes if not FROM_ROWS.has(note))


def _notes_of(rows: Sequence[CellRow]) -> Iterator[Finding]:
    """What the rows of a table give occasion to say."""
    if any(or_none(row.global_batch) is not None or row.settings.per_device_batch is not None for row in rows):
        yield BATCH_TERMS.found(None)
    fast = [row for row in rows if has_speed(row)]
    work = other_work(fast)
    if work:
        yield OTHER_WORK.found(None, work=work, so=_so(fast))
    if any(row.source == "imported" for row in rows):
        yield IMPORTED.found(None)
    few = [row for row in rows if not isinstance(row.network_share, Unknown) and row.exposed_steps.words]
    if few:
        least = min(few, key=lambda row: row.exposed_steps.known / row.exposed_steps.measured)
        yield FEW_EXPOSED.found(
            None, rows=format_count(len(few), "row"), label=least.label, steps=least.exposed_steps.words
        )
    paid = currencies(rows)
    if len(paid) > 1:
        yield CURRENCIES.found(None, currencies=list_currencies(paid))


def _so(rows: Sequence[CellRow]) -> str:
    names = differing(rows)
    if not names:
        return "a sample may need a different amount of work in each row, so samples/s may not be comparable"
    tokens = "compare tokens/s" if names == ("sequence_length",) else "samples/s are not comparable"
    return f"a sample needs a different amount of work in each row, so {tokens}"
