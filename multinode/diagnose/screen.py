"""What `explain` prints: the first failure, its cause and fix, and what came after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from multinode.diagnose.explanation import Explanation, LogFailure
from multinode.diagnose.translation import translate
from multinode.render.sheet import Block, Labels, Prose
from multinode.units import format_count, format_list

# Of a message; its log has all of it.
_MOST_CHARS = 160


def show(explanation: Explanation) -> Iterator[Block]:
    """The first failure of the logs, its cause and fix; in detail its lines."""
    first = explanation.first_failure
    if first is None:
        yield from _nothing(explanation)
        return
    shown = translate(first)
    rows = [("Cause", shown.cause or _unknown(first)), ("Fix", shown.hint or "")]
    rows += _rows("Next", explanation.next)
    rows += _rows("Then" if explanation.order_known else "Also", map(_sentence, explanation.other_failures))
    if not explanation.order_known:
        rows.append(("Order", "the logs do not show which of these came first"))
    yield Prose(_sentence(first), "lead")
    yield Labels(tuple((name, text) for name, text in rows if text))
    yield Labels(tuple((name, text) for name, text in _rows("Log", first.details) if text), detail="full")


def _nothing(explanation: Explanation) -> Iterator[Block]:
    lines = format_count(sum(explanation.files.values()), "line")
    logs = format_count(len(explanation.files), "log")
    found = f"no failure found in {logs} ({lines})"
    if explanation.benchmarks:
        programs = format_list(tuple(dict.fromkeys(explanation.benchmarks.values())))
        contain = "it contains" if len(explanation.files) == 1 else "they contain"
        found = (
            f"no error message found in {logs} ({lines}), but {contain} {programs} results, which multinode nccl-test "
            "can evaluate"
        )
    yield Prose(found, "lead")
    yield Labels((*_rows("Last", explanation.last_lines), *_rows("Next", explanation.next)))


def _rows(name: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    return [("" if number else name, text) for number, text in enumerate(texts)]


def _unknown(failure: LogFailure) -> str:
    return "unknown; this is the program's own message" if failure.is_own else ""


def _sentence(failure: LogFailure) -> str:
    where = failure.file if failure.line is None else f"{failure.file}, line {failure.line}"
    place = ", ".join(filter(None, (failure.node, failure.time)))
    return f"{where}{f' ({place})' if place else ''}: {_first_sentence(failure.message)}"


def _first_sentence(message: str) -> str:
    if len(message) <= _MOST_CHARS:
        return message
    cut = message[:_MOST_CHARS]
    end = cut.rfind(". ")
    return cut[: end + 1] if end > 0 else f"{cut.rpartition(' ')[0] or cut} ..."
