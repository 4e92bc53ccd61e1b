"""Prices: what GPUs and nodes cost, as a file has it; strict about every key. What a run costs is not said here."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.accelerators import device_key
from multinode.strict_yaml import WrongValue, decode_yaml

_HINT = "a file to start from: configs/figures/gpu_prices.yaml, which multinode init --example writes"
# Above it a price is a slip of the pen; so is one below nothing.
_Money = Annotated[float, Meta(ge=0, le=1e12)]
_LONGEST_CURRENCY = 12


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one GPU, or one node, costs; None is unknown, of one of the two at most."""

    hourly: _Money | None = None
    purchase: _Money | None = None

    def __post_init__(self) -> None:
        if self.hourly is None and self.purchase is None:
            raise WrongValue("it has no price: expected hourly, purchase or both")


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of prices.

    Attributes:
        currency: one word for all of them: `CNY`, `EUR`.
        date: of the prices, `2024-02-24`; None is unknown.
        source: where they are from, in words.
        devices: of one GPU, by the name that NVML gives it, or without the maker's.
        nodes: of a whole node, by its name in the hostfile.
    """

    currency: str
    date: str | None = None
    source: str | None = None
    devices: dict[str, Price] = {}
    nodes: dict[str, Price] = {}

    def __post_init__(self) -> None:
        currency = self.currency
        if not currency.isprintable() or len(currency.split()) != 1 or len(currency) > _LONGEST_CURRENCY:
            raise WrongValue("expected one word, such as EUR", "currency")
        if self.source is not None and not self.source.isprintable():
            raise WrongValue("expected one line of characters that print", "source")
        try:
            dt.date.fromisoformat(self.date or "2024-02-24")
        except ValueError:
            raise WrongValue("expected a date such as 2024-02-24", "date") from None
        written: dict[str, str] = {}
        for name in self.devices:
            key = device_key(name)
            if not key or not name.isprintable():
                raise WrongValue("it is no name of a device", "devices", name)
            if key in written:
                raise WrongValue(f"it is the same device as {written[key]!r}", "devices", name)
            written[key] = name

    def of_device(self, name: str) -> Price | None:
        """The price of a GPU under whichever of its names; None where the file has none."""
        key = device_key(name)
        return next((price for written, price in self.devices.items() if device_key(written) == key), None)


def parse_prices(text: str, source: str = "prices file") -> Prices:
    """The prices of a YAML text; `source` is its path, for messages.

    Raises:
        UsageError: `source:line:` and what is wrong: a key is unknown, missing or of the wrong kind, or a device stands
            there under two names.
    """
    return decode_yaml(text, Prices, source, _HINT)
