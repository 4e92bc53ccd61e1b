"""The options that `--average` replaces, and how it says what they said. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

_FORMER = ("sync-every", "diloco", "sync-dtype")


def respell_average(given: Mapping[Any, object]) -> str | None:
    """The values of `--average` that ask for what these options asked for, with commas between.

    Args:
        given: values of options by name, also others; each may be a list with commas.

    Returns:
        None if none of them is replaced by `--average`.
    """
    named = {str(name).replace("_", "-"): str(value) for name, value in given.items()}
    if not any(name in named for name in _FORMER):
        return None
    lists = {name: named[name].split(",") if named.get(name) else [] for name in _FORMER}
    methods = [each if each == "none" else f"local:{each}" for each in lists["sync-every"]]
    methods += [f"diloco:{each}" for each in lists["diloco"]]
    dtypes = ["" if each == "none" else f":{each}" for each in lists["sync-dtype"]] or [""]
    pairs = itertools.product(methods or ["local:H"], dtypes)
    return ",".join(dict.fromkeys(method if method == "none" else method + dtype for method, dtype in pairs))
