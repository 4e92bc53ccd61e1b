"""short_device_name, device_key: one device, a GPU or a processor, under the several names that it goes by.

`NVIDIA GeForce RTX 4090`, as NVML has it, is the `RTX 4090` of every published table, and the kernel's `AMD EPYC 9B14
96-Core Processor` an `AMD EPYC 9B14`. Nothing is guessed: an `A100 80GB PCIe` is not just any A100.
"""

from __future__ import annotations

import re

# The maker of GPUs and the line of products; what is left tells one GPU from another.
_PASSED_OVER = frozenset({"nvidia", "geforce", "tesla"})
# A workstation card of the Ampere line is called with and without RTX: `RTX A6000`, `A6000`.
_AMPERE_WORKSTATION = re.compile(r"RTX (A\d{4})\b", re.IGNORECASE)
_TRADE_MARK = re.compile(r"\((?:R|TM)\)", re.IGNORECASE)
# What every processor is, and how many cores all of a model have; of `2 x CPU` nothing else would be left.
_PROCESSOR = re.compile(r"(?<=\w )(?<! x )(?:\w+-Core )?(?:Processor|CPU)\b ?", re.IGNORECASE)
# The clock of a model that has a number. A virtual machine's processor may have none, and nothing else to tell it by.
_CLOCK = re.compile(r"(\d\w?) @ [\d.]+GHz")


def short_device_name(name: str) -> str:
    """The name without what all of its kind have: `RTX 4090`, `A6000`, `V100-SXM2-16GB`, `Intel Xeon Platinum 8481C`.

    As it is where nothing would be left.
    """
    told = _CLOCK.sub(r"\1", _PROCESSOR.sub("", _TRADE_MARK.sub("", " ".join(name.split()))))
    words = [word for word in told.split() if word.casefold() not in _PASSED_OVER]
    return _AMPERE_WORKSTATION.sub(r"\1", " ".join(words or name.split()))


def device_key(name: str) -> str:
    """What two names of the same device have in common; names with different keys are different devices."""
    return short_device_name(name).casefold()
