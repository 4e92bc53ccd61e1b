"""Unknown: a fact that is unknown, with the reason, in the form of NodeFacts in JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..channel import Record
from ..programs import QueryFailed

NOT_ASKED = "not asked for"
NO_ANSWER = "it did not answer in time"
WITHOUT_CUDA = "torch was built without CUDA"


class Unknown(dict[str, str]):
    """Stands in the place of a fact."""

    def __init__(self, reason: str) -> None:
        super().__init__({"is": "unknown", "reason": reason})


def found(read: Callable[[], Any]) -> Any:
    """What a reading finds, or why it is unknown."""
    try:
        return read()
    except (OSError, ValueError, LookupError, QueryFailed) as error:
        return Unknown(str(error))


def or_empty(items: Any) -> Any:
    """The items; none if they are unknown."""
    return [] if isinstance(items, Unknown) else items


def or_none(fact: Any) -> Any:
    """The fact; None if it is unknown."""
    return None if isinstance(fact, Unknown) else fact


def entries(values: Any) -> Record:
    """A dictionary, which Unknown could be taken for, with its tag; or Unknown itself."""
    return values if isinstance(values, Unknown) else {"is": "entries", "values": values}
