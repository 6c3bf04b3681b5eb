"""Sampling defaults of a model: the settings in its generation_config.json, used unless a setting is given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from jaxgpt.config import SamplingParams
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.directories import GENERATION_CONFIG
from jaxgpt.errors import UserError, short_repr

NAMES = tuple(field.name for field in fields(SamplingParams))
# Unsupported transformers settings that change the sampled tokens or end the text, with their values without effect.
NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "penalty_alpha": (0,),
    "num_beams": (1,),
    "encoder_repetition_penalty": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({}, []),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([], ""),
    "exponential_decay_length_penalty": (),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "watermarking_config": ({},),
    "constraints": ([],),
    "dola_layers": ([],),
    "max_time": (),
    "num_beam_groups": (1,),
    "token_healing": (False,),
}


class SamplingDefaults(NamedTuple):
    """The sampling settings of generation_config.json.

    Attributes:
        values: fields of `SamplingParams`; {}: the model has no such settings.
        ignored: value of each setting that is not used, with the reason, keyed by the setting's name.
    """

    values: dict[str, Any]
    ignored: dict[str, str]

    def note(self, given: Collection[str]) -> str:
        """Return a line with the settings that change a default and the ignored settings, without those in `given`; or ""."""
        used = {name: value for name, value in self.values.items() if name not in given}
        own = vars(SamplingParams())
        changed = [f"{name} {value:g}" for name, value in used.items() if value != own[name]]
        ignored = [f"{name} {why}" for name, why in self.ignored.items() if name not in given]
        parts = []
        if changed:
            parts.append(f"sampling: {', '.join(changed)} from {GENERATION_CONFIG}")
        if ignored:
            parts.append(f"not used from {GENERATION_CONFIG}: {', '.join(ignored)}")
        return "; ".join(parts)


def sampling_defaults(tokenizer: Tokenizer) -> SamplingDefaults:
    """Return the sampling settings that a model recommends; `do_sample` false means temperature 0.

    Invalid settings, and settings without an equivalent, are not used.
    """
    generation = tokenizer.special.generation
    values = dict[str, Any]()
    ignored = dict[str, str]()
    for name in NAMES:
        value = generation.get(name)
        if value is None:
            continue
        try:
            checked = SamplingParams(**{name: value})
        except UserError as e:
            ignored[name] = f"{short_repr(value)} ({e})"
            continue
        values[name] = getattr(checked, name)

    do_sample = generation.get("do_sample")
    if do_sample is False:
        values["temperature"] = 0.0
        ignored.pop("temperature", None)
    elif do_sample not in (None, True):
        ignored["do_sample"] = f"{short_repr(do_sample)} (do_sample must be true or false)"

    for name, without_effect in NOT_APPLIED.items():
        value = generation.get(name)
        if value is not None and value not in without_effect:
            ignored[name] = f"{short_repr(value)} (not supported)"
    return SamplingDefaults(values, ignored)


def with_defaults(tokenizer: Tokenizer, given: Mapping[str, Any], without: Collection[str] = ()) -> dict[str, Any]:
    """Return the given settings, and the model's sampling defaults for all others except the settings in `without`."""
    defaults = sampling_defaults(tokenizer).values
    return {name: value for name, value in defaults.items() if name not in without} | dict(given)
