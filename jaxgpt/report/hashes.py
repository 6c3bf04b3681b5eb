"""Hashes of n-grams, and sets of hashes, to find equal n-grams in large data."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxgpt.data.order import mix

GRAM = 13  # tokens per n-gram; two texts rarely share an n-gram of this length by chance
ODD = 0x9E3779B97F4A7C15  # multiplier of hashes: the increment of splitmix64
SPREAD = 8  # minimum number of table entries per hash, so that one lookup excludes most hashes outside the set


class HashSet:
    """A set of 64-bit hashes."""

    def __init__(self, hashes: np.ndarray) -> None:
        self.hashes = np.unique(hashes)  # sorted
        bits = max((SPREAD * len(self.hashes)).bit_length(), 1)
        self._shift = np.uint64(64 - bits)
        self._used = np.zeros(1 << bits, bool)  # indexed by the most significant bits of a hash
        self._used[self.hashes >> self._shift] = True

    def find(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ascending indices of the `hashes` in the set, and the index of each in `self.hashes`."""
        candidates = np.flatnonzero(self._used[hashes >> self._shift])
        likely = hashes[candidates]
        ranks = np.searchsorted(self.hashes, likely)
        ranks = np.minimum(ranks, len(self.hashes) - 1)
        equal = self.hashes[ranks] == likely
        return candidates[equal], ranks[equal]


class Grams:
    """64-bit hashes of the n-grams of a row of ids, for any n.

    The n-grams for n = 2^(k + 1) consist of two n-grams for n = 2^k, so their hashes are computed from the hashes for 2^k.
    All arithmetic is modulo 2^64: NumPy's products and sums of uint64 arrays wrap without a warning.
    """

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids
        unsigned = ids.astype(np.int64).view(np.uint64)
        self._hashes = [mix(unsigned + np.uint64(1))]  # hashes of n-grams for n = 2^k, at index k

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, n: int) -> np.ndarray:
        """Return the hash of each n-gram in order, from its first and last 2^k ids, k = floor(log2 n)."""
        k = n.bit_length() - 1
        while len(self._hashes) <= k:
            last = len(self._hashes) - 1
            self._hashes.append(self._join(last, 1 << last))
        remainder = n - (1 << k)
        return self._join(k, remainder) if remainder else self._hashes[k]

    def _join(self, k: int, distance: int) -> np.ndarray:
        """Hash the n-grams, n = 2^k + `distance`, from two n-grams of 2^k ids that begin `distance` ids apart."""
        hashes = self._hashes[k]
        factor = np.uint64(ODD * (2 * k + 1) % 2**64)  # a different odd number for each k
        count = max(len(hashes) - distance, 0)
        joined: np.ndarray = hashes[:count] * factor + hashes[distance:]
        return joined


def overlap(hashes: np.ndarray, training: Iterable[np.ndarray]) -> float:
    """Return the fraction of `hashes` (not empty) found in the training hashes; reads `training` once."""
    wanted = HashSet(hashes)
    found = np.zeros(len(wanted.hashes), bool)
    for block in training:
        _, ranks = wanted.find(block)
        found[ranks] = True
    rank = np.searchsorted(wanted.hashes, hashes)
    return float(found[rank].mean())
