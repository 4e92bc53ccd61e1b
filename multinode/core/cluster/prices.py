"""Prices: what GPUs and nodes cost, as a file has it; strict about every key. What a run costs is not said here."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.core.cluster.device_name import device_key
from multinode.core.text.training_yaml import WrongYaml, parse_yaml
from multinode.core.text.yaml_places import compose_yaml, line_of
from multinode.decoding import convert
from multinode.errors import UsageError

__all__ = ["Price", "Prices", "parse_prices"]

_HINT = "a file to start from: configs/figures/gpu_prices.yaml"
# Above it a price is a slip of the pen; so is one below nothing.
_Money = Annotated[float, Meta(ge=0, le=1e12)]
_LONGEST_CURRENCY = 12


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one GPU, or one node, costs; None is unknown."""

    hourly: _Money | None = None
    purchase: _Money | None = None


class Prices(msgspec.Struct, frozen=True, kw_only=True):
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

    def of_device(self, name: str) -> Price | None:
        """The price of a GPU under whichever of its names; None where the file has none."""
        key = device_key(name)
        return next((price for written, price in self.devices.items() if device_key(written) == key), None)


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file as it is read at first: the entries are looked at one by one, to name the one that is wrong."""

    currency: str
    date: str | None = None
    source: str | None = None
    devices: dict[str, Any] = {}
    nodes: dict[str, Any] = {}


class _Wrong(Exception):
    """What is wrong below some keys."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = path


def parse_prices(text: str, source: str = "prices file") -> Prices:
    """The prices of a YAML text; `source` is its path, for messages.

    Raises:
        UsageError: `source:line:` and what is wrong: a key is unknown, missing or of the wrong kind, or a device stands
            there under two names.
    """
    try:
        return _read(parse_yaml(text))
    except WrongYaml as wrong:
        raise UsageError(f"{source}:{wrong.line or 1}: {wrong}", hint=_HINT) from None
    except _Wrong as wrong:
        keys = "".join(f"{key!r}: " for key in wrong.path)
        line = line_of(compose_yaml(text), wrong.path)
        raise UsageError(f"{source}:{line}: {keys}{wrong}", hint=_HINT) from None


def _read(data: Any) -> Prices:
    try:
        written = convert(data, _Written)
    except msgspec.ValidationError as error:
        raise _Wrong(str(error), *_first_word(str(error), data)) from None
    _check_words(written)
    devices = _entries("devices", written.devices)
    _check_names(tuple(devices))
    return Prices(
        currency=written.currency,
        date=written.date,
        source=written.source,
        devices=devices,
        nodes=_entries("nodes", written.nodes),
    )


def _first_word(message: str, data: Any) -> tuple[str, ...]:
    """The key of the file that a message of msgspec speaks of."""
    keys = data if isinstance(data, dict) else {}
    return tuple(key for key in keys if isinstance(key, str) and (f"`{key}`" in message or f"$.{key}" in message))[:1]


def _check_words(written: _Written) -> None:
    currency = written.currency
    if not currency.isprintable() or len(currency.split()) != 1 or len(currency) > _LONGEST_CURRENCY:
        raise _Wrong("expected one word, such as EUR", "currency")
    if written.source is not None and not written.source.isprintable():
        raise _Wrong("expected one line of characters that print", "source")
    try:
        dt.date.fromisoformat(written.date or "2024-02-24")
    except ValueError:
        raise _Wrong("expected a date such as 2024-02-24", "date") from None


def _entries(group: str, written: dict[str, Any]) -> dict[str, Price]:
    found = {}
    for name, entry in written.items():
        try:
            price = convert(entry, Price)
        except msgspec.ValidationError as error:
            raise _Wrong(str(error), group, name) from None
        if price.hourly is None and price.purchase is None:
            raise _Wrong("it has no price: expected hourly, purchase or both", group, name)
        found[name] = price
    return found


def _check_names(names: Sequence[str]) -> None:
    written: dict[str, str] = {}
    for name in names:
        key = device_key(name)
        if not key or not name.isprintable():
            raise _Wrong("it is no name of a device", "devices", name)
        if key in written:
            raise _Wrong(f"it is the same device as {written[key]!r}", "devices", name)
        written[key] = name
