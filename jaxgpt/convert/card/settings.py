"""The section of a model card about the settings of the run."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

from jaxgpt.config import Config, flat


def settings_section(config: Config) -> str:
    """List the settings that differ from the defaults, without private settings; "": none."""
    private = _private_settings()
    defaults = flat(Config())
    rows = []
    for name, value in sorted(flat(config).items()):
        if value != defaults[name] and name not in private:
            rows.append(f"- `{name}`: {value}")
    if not rows:
        return ""
    return "\n".join(["Settings that differ from the defaults:\n", *rows, ""])


def _private_settings() -> frozenset[str]:
    """Return the names of settings whose values stay out of model cards, such as paths."""
    private = set[str]()
    default = Config()
    for each in fields(Config):
        section = getattr(default, each.name)
        if is_dataclass(section):
            private |= {f"{each.name}.{own.name}" for own in fields(section) if own.metadata["private"]}
        elif each.metadata["private"]:
            private.add(each.name)
    return frozenset(private)
