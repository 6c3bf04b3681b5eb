"""The order of windows: for each epoch, a permutation of n items as a function of (seed, epoch)."""

from __future__ import annotations

import functools
import math
import zlib

import numpy as np

SORTED = 1 << 20  # maximum number of items of a cached permutation (8 MB)
ROUNDS = 8  # number of rounds of the Feistel network in `permute`


def shuffled(positions: np.ndarray, n: int, seed: int, epoch: int, source: str = "") -> np.ndarray:
    """Return the elements at `positions` of an epoch's permutation of 0, ..., n - 1, int64.

    For up to `SORTED` items outside a mixture, the order is the cached argsort of n random numbers. Otherwise, `permute`
    computes it, with memory only for the requested positions. The order must not change between versions, because runs
    resume within an epoch. `source` selects the order of a source in a mixture; empty: no mixture.
    """
    if n > SORTED or source:
        return permute(positions, n, draw(seed, "order" + source, epoch, ROUNDS))
    items: np.ndarray = _sorted(n, seed, epoch)[positions]
    return items


def permute(positions: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Apply a pseudorandom permutation of 0, ..., n - 1 to `positions`, without storing the permutation.

    A number is written as `left * b + right` with `left < a` and `right < b`, where a and b are about sqrt(n). The rounds of
    a Feistel network change the two halves in turn:

        left = (left + mix(right + key)) mod a,    right = (right + mix(left + key)) mod b

    Each round is invertible, so the rounds permute the numbers below `a * b`. A result of n or more is permuted again until it
    is below n (cycle walking; Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). `a * b < n + 2 sqrt(n) + 1`,
    so repetition is rare. `keys` has one int64 per round.
    """
    a = math.isqrt(max(n - 1, 0)) + 1
    b = -(-n // a)
    out = _rounds(positions.astype(np.uint64), a, b, keys)
    outside = out >= n
    while outside.any():
        out[outside] = _rounds(out[outside], a, b, keys)
        outside = out >= n
    return out.astype(np.int64)


def draw(seed: int, stream: str, index: int, n: int) -> np.ndarray:
    """Draw n random int64 >= 0 from the seed, the name of a stream and an index within it.

    The numbers come from the generator's raw output, which is the same in all versions of NumPy.
    """
    key = np.array([seed, zlib.crc32(stream.encode())], np.uint64)
    counter = np.array([0, index, 0, 0], np.uint64)
    raw = np.random.Philox(key=key, counter=counter).random_raw(n)
    return (raw >> np.uint64(1)).astype(np.int64)


@functools.lru_cache(maxsize=2)
def _sorted(n: int, seed: int, epoch: int) -> np.ndarray:
    return np.argsort(draw(seed, "order", epoch, n), kind="stable")


def _rounds(numbers: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    sizes = np.uint64(a), np.uint64(b)
    halves = list(np.divmod(numbers, sizes[1]))
    for i, key in enumerate(keys.astype(np.uint64)):
        side = i % 2
        halves[side] = (halves[side] + mix(halves[1 - side] + key) % sizes[side]) % sizes[side]
    mixed: np.ndarray = halves[0] * sizes[1] + halves[1]
    return mixed


def mix(x: np.ndarray) -> np.ndarray:
    """Mix the bits of uint64 numbers with the finalizer of splitmix64 (Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
