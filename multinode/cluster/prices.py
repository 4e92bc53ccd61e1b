"""Prices: cost of GPUs and nodes from a file; strict about every key. The cost of a run is computed elsewhere."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.accelerators import device_key
from multinode.strict_yaml import WrongValue, decode_yaml

_HINT = "start from configs/figures/gpu_prices.yaml, which multinode init --example writes"
# A higher or negative price is a typing error.
_Money = Annotated[float, Meta(ge=0, le=1e12)]
_LONGEST_CURRENCY = 12


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost of one GPU or node; None is unknown, for at most one of the two."""

    hourly: _Money | None = None
    purchase: _Money | None = None

    def __post_init__(self) -> None:
        if self.hourly is None and self.purchase is None:
            raise WrongValue("it has no price: expected hourly, purchase or both")


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A price file."""

    currency: str  # one for all prices: `CNY`, `EUR`
    date: str | None = None  # of the prices, `2024-02-24`; None if unknown
    source: str | None = None  # where they are from, in words
    devices: dict[str, Price] = {}  # per GPU, by NVML's name with or without the vendor
    nodes: dict[str, Price] = {}  # per node, by its name in the hostfile

    def __post_init__(self) -> None:
        currency = self.currency
        if not currency.isprintable() or len(currency.split()) != 1 or len(currency) > _LONGEST_CURRENCY:
            raise WrongValue("expected one word, such as EUR", "currency")
        if self.source is not None and not self.source.isprintable():
            raise WrongValue("expected one line of printable characters", "source")
        try:
            dt.date.fromisoformat(self.date or "2024-02-24")
        except ValueError:
            raise WrongValue("expected a date such as 2024-02-24", "date") from None
        written: dict[str, str] = {}
        for name in self.devices:
            key = device_key(name)
            if not key or not name.isprintable():
                raise WrongValue("not a device name", "devices", name)
            if key in written:
                raise WrongValue(f"it is the same device as {written[key]!r}", "devices", name)
            written[key] = name

    def of_device(self, name: str) -> Price | None:
        """The price of a GPU under any of its names; None if the file has none."""
        key = device_key(name)
        return next((price for written, price in self.devices.items() if device_key(written) == key), None)


def parse_prices(text: str, source: str = "prices file") -> Prices:
    """The prices in a YAML text; `source` is its path, for messages."""
    return decode_yaml(text, Prices, source, _HINT)
