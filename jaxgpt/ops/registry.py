"""A registry: a dict of functions, keyed by name, that programs may extend."""

from __future__ import annotations

from collections import UserDict
from typing import TypeVar

import jax

F = TypeVar("F")


class Registry(UserDict[str, F]):
    """Functions by name. Changing or deleting an entry clears JAX's caches, because programs are cached by name."""

    def __setitem__(self, name: str, function: F) -> None:
        if name in self.data:
            jax.clear_caches()
        self.data[name] = function

    def __delitem__(self, name: str) -> None:
        jax.clear_caches()
        del self.data[name]
