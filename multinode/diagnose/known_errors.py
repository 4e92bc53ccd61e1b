"""The catalogue of error messages (known_errors.toml): what each means and what fixes it; and the search in it."""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Mapping
from importlib.resources import files

import msgspec

from multinode.decoding import convert
from multinode.text_pattern import find_first, find_values, literals

# The sections of the page.
PROJECTS = (
    "NCCL",
    "gloo",
    "PyTorch",
    "CUDA",
    "DeepSpeed",
    "Accelerate, Transformers",
    "LLaMA-Factory",
    "Slurm",
    "SSH",
    "System",
)


class KnownError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of error."""

    id: str  # its name, which is also its heading on the page
    project: str  # who prints it, one of `PROJECTS`
    texts: tuple[str, ...]  # as printed (text_pattern)
    cause: str  # why it happens
    fix: str  # what to do; `{node}` is the node that failed, and `{{` a brace
    source: str  # file of the project, or issue, in which the texts stand as they are printed
    kind: str | None = None  # as in `Failure`
    checks: tuple[str, ...] = ()  # names of the checks that find the cause before a launch
    # whether it is what workers say when another worker or node is gone: a consequence, while there is any other cause
    of_peers: bool = False
    is_general: bool = False  # whether it gives way to an error that says more, in the rest of what was said
    is_harmless: bool = False  # whether it also stands in logs of runs that end well: it explains no failure
    # whether it explains a failure only as the exception or the last words of a worker: programs also print it of what
    # they survive
    is_last: bool = False
    # whether it says that a process got a signal to stop: a consequence of any exception before it, and of several such
    # lines the first counts
    is_stop: bool = False

    def matches(self, text: str) -> bool:
        """Whether one of the texts stands in it."""
        return find_values(self.texts, text) is not None

    def fix_on(self, node: str) -> str:
        """What to do where this node failed."""
        return self.fix.format(node=node)


@functools.cache
def known_errors() -> Mapping[str, KnownError]:
    """The catalogue by id, read when it is first asked for: a run that goes well does not need it."""
    return decode_catalogue(files(__package__).joinpath("known_errors.toml").read_text("utf-8"))


def decode_catalogue(text: str) -> Mapping[str, KnownError]:
    """A catalogue by id, in its order."""
    errors = {}
    for name, entry in msgspec.toml.decode(text).items():
        try:
            errors[name] = convert({**entry, "id": name}, KnownError)
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}: {error}") from error
    return errors


_LETTERS = re.compile("[a-z]+")
# Words that stand in most logs.
_COMMON = frozenset(
    _LETTERS.findall("""
    address and are at available backend but by call cannot card cluster code command communication config could cuda
    data dataset default device distributed error exception exit failed failure file for found from got group have
    host in info input installed ipv is it json launch library line list load loading message model module name net
    network no node not number object of on only operation option output package please port process python rank ranks
    read received remote request required runtime script server setting size so start step support system tensor that
    the this time to token torch train training type value version was with worker workers
    """)
)


def anchor(text: str) -> str:
    """A word that every line with this text has: the rarest, by its length."""
    parts = literals(text.lower())
    whole = [
        word[0]
        for number, part in enumerate(parts)
        for word in _LETTERS.finditer(part)
        if (word.start() or not number) and (word.end() < len(part) or number == len(parts) - 1)
    ]
    return max(whole, key=lambda word: (word not in _COMMON, len(word)))


@functools.cache
def _by_anchor() -> Mapping[str, tuple[int, ...]]:
    indices: defaultdict[str, list[int]] = defaultdict(list)
    for place, error in enumerate(known_errors().values()):
        for word in {anchor(text) for text in error.texts if not error.is_harmless}:
            indices[word].append(place)
    return {word: tuple(places) for word, places in indices.items()}


def find_error(text: str) -> KnownError | None:
    """The first of the catalogue that explains a text; None where nothing does."""
    by_anchor, errors = _by_anchor(), tuple(known_errors().values())
    words = by_anchor.keys() & set(_LETTERS.findall(text.lower()))
    places = sorted(set(itertools.chain.from_iterable(by_anchor[word] for word in words)))
    found = find_first((errors[place] for place in places), text)
    return found[0] if found is not None else None
