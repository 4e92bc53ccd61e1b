"""The fastest that a network card could do, as its driver tells it (linux/ethtool.h). Changes no setting."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from typing import Optional

__all__ = ["fastest_mode", "read_card_speed"]

_SIOCETHTOOL = 0x8946
_GSET = 0x01
_GLINKSETTINGS = 0x4C
# struct ethtool_link_settings, and room for its three masks of at most 127 words each.
_SETTINGS = "II7Bb4B28x"
_SETTINGS_BYTES = struct.calcsize(_SETTINGS)
_WORDS_AT = 9
_MOST_WORDS = 127
_WORD_BYTES = 4
_IFREQ = "16sP16x"

# Bits of the link modes by Mbit/s (enum ethtool_link_mode_bit_indices). Those of 20 and 56 Gbit/s are left out: they
# are of back planes, and of one maker's cards with the same maker's switches; a card that could is not held back.
_MODES_MBIT = {
    10: (0, 1, 92),
    100: (2, 3, 67, 90, 91),
    1_000: (4, 5, 17, 41, 68),
    2_500: (15, 47),
    5_000: (48,),
    10_000: (12, 18, 19, 20, *range(42, 47)),
    25_000: (31, 32, 33),
    40_000: tuple(range(23, 27)),
    50_000: (34, 35, 40, *range(52, 57)),
    100_000: (*range(36, 40), *range(57, 62), *range(75, 80)),
    200_000: (*range(62, 67), *range(80, 85)),
    400_000: (*range(69, 74), *range(85, 90)),
}
_MBIT_PER_GBIT = 1000


def read_card_speed(ifname: str) -> Optional[float]:
    """Gbit/s of the fastest mode that the card supports; None where its driver names none, as in virtual machines."""
    try:
        return fastest_mode(_read_modes(ifname))
    except OSError:
        return None


def fastest_mode(supported: bytes) -> Optional[float]:
    """Gbit/s of the fastest mode in a mask of link modes, little-endian; None where it has none that is known."""
    mask = int.from_bytes(supported, "little")
    speeds = [speed for speed, bits in _MODES_MBIT.items() if any(mask >> bit & 1 for bit in bits)]
    return max(speeds) / _MBIT_PER_GBIT if speeds else None


def _read_modes(ifname: str) -> bytes:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as query:
        try:
            words = -_words(_ask(query, ifname, _settings(0)))
            answer = _ask(query, ifname, _settings(words))
            return _little(answer[_SETTINGS_BYTES : _SETTINGS_BYTES + words * _WORD_BYTES])
        except OSError:
            # Kernels before 4.6 have the older question alone, with 32 bits in the second word of its answer.
            answer = _ask(query, ifname, struct.pack("I40x", _GSET))
            return _little(answer[_WORD_BYTES : 2 * _WORD_BYTES])


def _settings(words: int) -> bytes:
    # Asked with no words, the kernel answers with their number, negative; asked with as many, with the masks.
    fields = [0] * 14
    fields[0], fields[_WORDS_AT] = _GLINKSETTINGS, words
    return struct.pack(_SETTINGS, *fields) + bytes(3 * _MOST_WORDS * _WORD_BYTES)


def _words(answer: bytes) -> int:
    words: int = struct.unpack(_SETTINGS, answer[:_SETTINGS_BYTES])[_WORDS_AT]
    return words


def _ask(query: socket.socket, ifname: str, question: bytes) -> bytes:
    buffer = array.array("B", question)
    fcntl.ioctl(query, _SIOCETHTOOL, struct.pack(_IFREQ, os.fsencode(ifname), buffer.buffer_info()[0]))
    return buffer.tobytes()


def _little(words: bytes) -> bytes:
    return struct.pack(f"<{len(words) // _WORD_BYTES}I", *struct.unpack(f"={len(words) // _WORD_BYTES}I", words))
