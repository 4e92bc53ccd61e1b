"""The notes under a table of cells: what its full run trains, what cannot be compared, where its prices come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.stats.unknown import Unknown, or_none
from multinode.sweep.cells import CellRow, currencies, differing, has_speed, list_currencies, other_work
from multinode.units import format_count

OWN = RuleGroup("Notes on a sweep or an import")
FROM_ROWS = RuleGroup("Notes that follow from the rows of a table")
FROM_PRICES = RuleGroup("Notes on the prices of a table")

FULL_RUN_OF_STEPS = OWN.rule(
    "full-run-of-steps",
    about="what the job trains if its length is given in steps",
    message="The full run is {samples:,} samples in every cell ({steps:,} steps of {batch:,} samples per worker on "
    "{workers:,} workers). Its time follows from the rate of the measured steps.",
    figures=("samples", "steps", "batch", "workers"),
)
FULL_RUN_OF_EPOCHS = OWN.rule(
    "full-run-of-epochs",
    about="what the job trains if its length is given in epochs",
    message="The full run is {times} of the dataset{size}. Its time follows from the rate of the measured steps.",
    figures=("epochs",),
)
IGNORED_COLUMNS = OWN.rule(
    "ignored-columns",
    about="columns of an imported table that were left out on request",
    message="Ignored columns: {names}.",
    figures=("names",),
)
LABEL_COLUMNS = OWN.rule(
    "label-columns",
    about="columns of an imported table whose titles are unknown, and whose texts label the rows",
    message="Columns of text with unknown titles are labels: {names}.",
    figures=("names",),
)
NO_ROW = OWN.rule(
    "no-row",
    about="no row of the table meets the conditions of --where",
    message="None of the {rows:,} rows matches {conditions}.",
    figures=("rows", "conditions"),
)

BATCH_TERMS = FROM_ROWS.rule(
    "batch-terms",
    about="what batch, accumulation and global batch are called elsewhere",
    message="Batch: per_device_train_batch_size in Hugging Face, train_micro_batch_size_per_gpu in DeepSpeed. "
    "Accumulation: gradient_accumulation_steps in both. Global batch: batch x accumulation x workers; it is the total "
    "train batch size in Hugging Face and train_batch_size in DeepSpeed.",
)
OTHER_WORK = FROM_ROWS.rule(
    "other-work",
    about="rows whose samples are different amounts of work, so that their samples/s cannot be compared",
    message="Rows {work}: {so}.",
)
IMPORTED = FROM_ROWS.rule(
    "imported",
    about="rows of an imported table",
    message="Imported rows were measured elsewhere, with unknown methods.",
)
FEW_EXPOSED = FROM_ROWS.rule(
    "few-exposed",
    about="rows whose exposed communication is known in fewer steps than were measured",
    message="Exposed communication is known in fewer steps than were measured in {rows}; {label}: {steps}.",
)
CURRENCIES = FROM_ROWS.rule(
    "currencies",
    about="prices in several currencies",
    message="Prices are in {currencies}, which cannot be compared.",
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
    message="Prices without a currency, from a hostfile or an imported table, are assumed to be in {currency}.",
    figures=("currency",),
)
UNPRICED = FROM_PRICES.rule(
    "unpriced",
    about="devices that the prices file does not have",
    message="The prices file has no price for {devices}, so cells with these devices have no price.",
    figures=("devices",),
)


def notes_of(rows: Sequence[CellRow]) -> Iterator[Finding]:
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
        return "a sample may be a different amount of work in each row, so samples/s may not be comparable"
    tokens = "compare tokens/s" if names == ("sequence_length",) else "samples/s are not comparable"
    return f"a sample is a different amount of work in each row, so {tokens}"
