"""Frameworks: what is trained by the keys of a file or by options, one module each; all are a `Framework`."""

from typing import NamedTuple


class Names(NamedTuple):
    """By what a framework is known outside, so that its module is imported where it is named."""

    commands: tuple[str, ...] = ()  # that start it
    packages: tuple[str, ...] = ()  # distributions that it needs on the nodes, beside torch


FRAMEWORKS = {
    "llamafactory": Names(commands=("llamafactory-cli", "lmf"), packages=("llamafactory",)),
    "trl": Names(commands=("trl",), packages=("trl",)),
    "swift": Names(commands=("swift",), packages=("ms-swift",)),
    "axolotl": Names(commands=("axolotl",), packages=("axolotl",)),
    "trainer": Names(packages=("transformers",)),
}
"""By the name of its module here, which is that of its package."""
