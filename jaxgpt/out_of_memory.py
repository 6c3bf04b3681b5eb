"""Exhausted memory of a device or of the host: recognize it, and describe it in one line."""

from __future__ import annotations

from jaxgpt.errors import one_line

MORE_HOST_MEMORY = "use a smaller model or batch, or a machine with more memory"  # fix for `out_of_host_memory`


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether an error of XLA reports exhausted memory of a device."""
    return "RESOURCE_EXHAUSTED" in str(error)


def out_of_host_memory(error: MemoryError) -> str:
    """Describe exhausted memory of the host."""
    details = one_line(error, 100)
    return f"out of memory on the host ({details})" if details else "out of memory on the host"
