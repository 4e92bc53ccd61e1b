"""LeverAxes: values of levers to combine in predictions. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from multinode.levers.averaging import Averaging, parse_average
from multinode.levers.compression import Compression, parse_compression
from multinode.levers.levers import Levers


class LeverAxes(msgspec.Struct, frozen=True, kw_only=True):
    """Values of `Levers` to combine. None stands for an unused change, an empty tuple for the measured value."""

    compression: tuple[Compression | None, ...] = ()
    averaging: tuple[Averaging | None, ...] = ()

    @classmethod
    def read(
        cls,
        *,
        grad_compress: Sequence[str | None] = (),
        average: Sequence[str | None] = (),
    ) -> LeverAxes:
        """The values of the options of these names.

        Raises:
            UsageError: one is wrong.
        """
        return cls(
            compression=tuple(parse_compression(kind) if kind is not None else None for kind in grad_compress),
            averaging=tuple(parse_average(each) if each is not None else None for each in average),
        )

    @classmethod
    def of(cls, levers: Levers) -> LeverAxes:
        """These levers alone."""
        return cls(**{name: (getattr(levers, name),) for name in cls.__struct_fields__})

    def combined(self, measured: Levers) -> tuple[Levers, ...]:
        """Every combination.

        Args:
            measured: of the training.
        """
        names = self.__struct_fields__
        axes = (getattr(self, name) or (getattr(measured, name),) for name in names)
        return tuple(
            msgspec.structs.replace(measured, **dict(zip(names, values, strict=True)))
            for values in itertools.product(*axes)
        )

    def alone(self, measured: Levers) -> Levers:
        """The levers of the training, with the value of each axis that has only one."""
        single = {name: axis[0] for name in self.__struct_fields__ if len(axis := getattr(self, name)) == 1}
        return msgspec.structs.replace(measured, **single)

    def dispensable(self, levers: Levers) -> tuple[str, ...]:
        """The levers, by field, that may also be left out: no axis has only values of them."""
        return tuple(name for name in levers.by_name if not (axis := getattr(self, name, ())) or None in axis)
