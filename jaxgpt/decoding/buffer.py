"""The token buffer: prompts and generated tokens, as filters and the sampler read them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxgpt.ops.attention import NO_TOKEN


class TokenBuffer(NamedTuple):
    """The tokens so far: a buffer of B rows with S slots.

    Attributes:
        ids_BS: int32, token ids; every row ends at slot `length - 1`, and later slots are undefined. Negative ids are not
            tokens: left padding (`NO_TOKEN`), and results of `sample_token` without a token.
        length: int32 scalar, number of slots in use, including left padding.
    """

    ids_BS: jax.Array
    length: jax.Array

    @property
    def seen_BS(self) -> jax.Array:  # noqa: N802
        """Boolean mask of the slots that hold tokens, `[B, S]`."""
        in_use_S = jnp.arange(self.ids_BS.shape[1]) < self.length
        return (self.ids_BS >= 0) & in_use_S[None, :]

    @property
    def tokens_B(self) -> jax.Array:  # noqa: N802
        """Number of tokens of each row, int32 `[B]`."""
        return self.seen_BS.sum(1, dtype=jnp.int32)

    @property
    def room(self) -> jax.Array:
        """Number of unused slots."""
        return self.ids_BS.shape[1] - self.length

    def matches(self, n: int) -> jax.Array:
        """Mark the slots where an earlier occurrence of the last n tokens begins, if a token follows it: bool `[B, S]`.

        Example: in the text `2 3 4 2 3 2 3`, with n = 2, the slots 0 and 3 are marked.

        A loop compares one token per iteration, and ends early if no slot matches. It is not unrolled, so the size of the
        program does not depend on n.
        """
        ids_BS, length = self
        # Slot s has a token after its n tokens, so rolling does not wrap here. If length <= n, no slot matches.
        continued_S = jnp.arange(ids_BS.shape[1]) < length - n
        earlier_BS = (ids_BS >= 0) & continued_S[None, :]
        start = jnp.int32(0), earlier_BS, ids_BS

        def can_match(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            i, matches_BS, _ = carry
            return (i < n) & matches_BS.any()

        def compare(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            i, matches_BS, ahead_BS = carry  # ahead_BS: ids_BS rolled left by i
            suffix_B1 = jax.lax.dynamic_slice_in_dim(ids_BS, length - n + i, 1, 1)
            matches_BS = matches_BS & (ahead_BS == suffix_B1)
            return i + 1, matches_BS, jnp.roll(ahead_BS, -1, 1)

        _, matches_BS, _ = jax.lax.while_loop(can_match, compare, start)
        return matches_BS

    def last(self, n: int) -> TokenBuffer:
        """Return the last n slots in use, left-padded if fewer are in use."""
        slot_n = self.length - n + jnp.arange(n)
        ids_Bn = self.ids_BS.take(slot_n, axis=1, mode="clip")
        ids_Bn = jnp.where(slot_n < 0, NO_TOKEN, ids_Bn)
        return TokenBuffer(ids_Bn, jnp.int32(n))

    def append(self, ids_BT: jax.Array) -> TokenBuffer:
        """Write tokens into the next slots, which must exist: JAX clamps the start index of an update."""
        ids_BS = jax.lax.dynamic_update_slice(self.ids_BS, ids_BT, (jnp.int32(0), self.length))
        return TokenBuffer(ids_BS, self.length + ids_BT.shape[1])
