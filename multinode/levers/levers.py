"""Levers: what changes the training itself, as one value from option to worker, record, prediction and table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from multinode.errors import UsageError
from multinode.levers.averaging import Averaging, parse_average
from multinode.levers.balance import Balance, parse_balance
from multinode.levers.compression import Compression, parse_compression
from multinode.levers.lever import Lever, Workers


class Levers(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Optional changes to the training itself, such as gradient compression. None means that a change is not used."""

    compression: Compression | None = None
    averaging: Averaging | None = None
    balance: Balance | None = None

    @classmethod
    def read(cls, **options: Any) -> Levers:
        """The levers of these options of `launch`: `Levers.read(grad_compress="fp16")`.

        Raises:
            UsageError: an option is wrong, or contradicts another.
        """
        return read_levers(LeverFields(**options))

    @property
    def by_name(self) -> dict[str, Lever]:
        """The levers that are used, by field."""
        fields = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: lever for name, lever in fields if lever is not None}

    def __iter__(self) -> Iterator[Lever]:
        """Iterate over the levers that are used."""
        return iter(self.by_name.values())

    @property
    def words(self) -> dict[str, str]:
        """Each in a few words, by field."""
        return {name: lever.words for name, lever in self.by_name.items()}

    @property
    def given(self) -> dict[str, str | int]:
        """Options of `launch`, by name without dashes."""
        return {name: value for lever in self for name, value in lever.given.items()}

    @property
    def options(self) -> tuple[str, ...]:
        """As arguments of `launch`."""
        return tuple(word for name, value in self.given.items() for word in (f"--{name}", str(value)))

    @property
    def algorithm(self) -> str | None:
        """What the workers do in place of averaging all gradients in each step; None if they average them."""
        return next((lever.algorithm for lever in self if lever.algorithm is not None), None)

    @property
    def exact(self) -> Levers:
        """The levers that leave the algorithm as it is."""
        return self.without(*(name for name, lever in self.by_name.items() if lever.algorithm is not None))

    @property
    def round_steps(self) -> int:
        """Steps after which all workers have the same parameters."""
        return self.averaging.every if self.averaging is not None else 1

    def joined(self, second: Levers) -> Levers:
        """Both; the second wins."""
        return msgspec.structs.replace(self, **second.by_name)

    def without(self, *names: str) -> Levers:
        """The others."""
        return msgspec.structs.replace(self, **dict.fromkeys(names))

    def on(self, nodes: int) -> Levers:
        """The levers that have an effect on this number of nodes."""
        idle = [name for name, lever in self.by_name.items() if lever.idle_alone is not None]
        return self.without(*idle) if nodes == 1 else self

    def beside(self, second: Levers) -> Levers:
        """The levers that can be combined with those of `second`."""
        return self.without(*(name for lever in second for name in lever.excludes))

    def compared(self, other: Levers) -> dict[str, tuple[str, str]]:
        """The words of each lever that one of the two has, here and in the other, by its title."""
        both = other.by_name | self.by_name
        words = {name: (self.words.get(name, "none"), other.words.get(name, "none")) for name in both}
        return {lever.title: words[name] for name, lever in both.items()}

    def refuse_pairs(self) -> None:
        """Refuse levers that cannot be combined.

        Raises:
            UsageError: two of these cannot.
        """
        for lever in self:
            for name, exclusion in lever.excludes.items():
                other = self.by_name.get(name)
                if other is not None:
                    message = f"{lever.option}{exclusion.why.format(other=other.option)}"
                    raise UsageError(message, hint=exclusion.hint)

    def check(self, workers: Workers) -> None:
        """Refuse workers that a lever cannot work with.

        Raises:
            UsageError: one cannot.
        """
        for lever in self:
            lever.check(workers)

    def environment(self, workers: Workers) -> dict[str, str]:
        """Variables of each worker."""
        return {name: value for lever in self for name, value in lever.environment(workers).items()}


TYPES: dict[str, type[Lever]] = {"compression": Compression, "averaging": Averaging, "balance": Balance}
"""Each lever's type, by field of Levers."""

NONE = Levers()
"""The training as it is."""


class LeverFields(msgspec.Struct, frozen=True, kw_only=True, rename="kebab"):
    """The options, as in a file of options."""

    grad_compress: str | None = None
    average: str | None = None
    balance: str | None = None


def read_levers(given: Any, measured: Callable[[str], Balance] = parse_balance) -> Levers:
    """The levers among the options of a verb.

    Args:
        given: has some of the fields of LeverFields; an option that the verb lacks is not given.
        measured: the speeds that a run has measured, by its name.

    Raises:
        UsageError: an option is wrong, or contradicts another.
    """
    fields = {name: getattr(given, name, None) for name in LeverFields.__struct_fields__}
    kind, average, speeds = fields["grad_compress"], fields["average"], fields["balance"]
    return Levers(
        compression=parse_compression(kind) if kind is not None else None,
        averaging=parse_average(average) if average is not None else None,
        balance=None if speeds is None else parse_balance(speeds) if "=" in speeds else measured(speeds),
    )
