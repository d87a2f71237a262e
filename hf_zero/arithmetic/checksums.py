"""Checksums of tensors by their bits, which a change of one bit changes, and which add up over parts of a tensor."""

from collections.abc import Iterable

import torch

WRAPS = 2**64
"""Checksums are numbers modulo this one."""
_WORD_BYTES = 8
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers of as many bytes as a number that fills no word."""
_ODD_WORD, _EVEN_WORD, _REMAINDER = 31, 33, 37
"""How often `checksum` counts a word at an odd and at an even index, and a number that fills no word."""


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Of a tensor's bits, an int64 scalar on its device; NaNs count by their bits.

    That of two tensors behind one another is the sum of theirs, modulo 2^64, where the first has a multiple of 16 bytes.
    """
    flat = values.detach().reshape(-1)
    size = flat.element_size()
    # torch refuses an int64 view that begins within a word of the storage.
    if flat.storage_offset() * size % _WORD_BYTES:
        flat = flat.clone()
    whole = flat.numel() * size // _WORD_BYTES * _WORD_BYTES // size
    # Words, which are added twenty times faster than numbers that are made wider first.
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    # Every other word counts more, so that two that have changed places are seen; and each an odd number of times, so that a sum
    # that wraps around loses no bit.
    total = words.sum() * _ODD_WORD + words[::2].sum() * (_EVEN_WORD - _ODD_WORD)
    return total + rest.view(_BITS[size]).sum(dtype=torch.int64) * _REMAINDER if rest.numel() else total


def checksum_of_parts(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the sum of the checksums of tensors on one device. The parts may have any number of bytes."""
    return torch.stack([checksum(part) for part in parts]).sum()


ONE_BIT = frozenset(
    sign * weight * 2**bit % WRAPS
    for sign in (1, -1)
    for weight in (_ODD_WORD, _EVEN_WORD, _REMAINDER)
    for bit in range(8 * _WORD_BYTES)
)
"""By how much the checksum changes if one bit of the values does."""
