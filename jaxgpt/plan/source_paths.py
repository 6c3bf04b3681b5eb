"""Source paths of instructions, such as `jit(train)/jvp(GPT)/h_0/attn/q_proj/dot_general`: modules and layers."""

from __future__ import annotations

import re

# Parts of a path that JAX adds for loops, calls, rematerialization and shards.
CONTROL = ("while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "shard_map")


def scopes_of(path: str) -> list[str]:
    """Return the modules and methods in a source path, from the outermost, without the transformations of JAX.

    The compiler joins the paths of merged instructions: `a/b/mul;a/c/add` and, with a common beginning, `a/(b/mul:c/add)`.
    The result is the scopes of the first path, or of the common beginning: `["a", "b"]` and `["a"]`.
    """
    first, _, _ = path.partition(";")
    common, joined, _ = first.partition("/(")
    scopes = common.split("/")
    if not joined:
        scopes.pop()  # the operation
    return [scope for scope in scopes if re.fullmatch(r"[\w.]+", scope) and scope not in CONTROL]


def site_of(path: str) -> str:
    """Shorten a source path to the modules of a layer, without the number of the block: `h/attn/q_proj, backward`."""
    names = scopes_of(path)
    layer = next((i for i, name in enumerate(names) if re.fullmatch(r"h(_\d+)?", name)), None)
    if layer is not None:
        inner = [name for name in names[layer + 1 :] if "." not in name]
        names = ["/".join(["h", *inner])]
    if not names:
        return ""
    return f"{names[-1]}, backward" if "transpose(" in path else names[-1]
