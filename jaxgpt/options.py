"""Options of generation: sampling, the end of a text, and beam search."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxgpt.errors import short_repr
from jaxgpt.settings import MAX_TOKENS, Section, as_int, setting

MAX_ROWS = 2**16  # maximum num_beams and num_return_sequences
NEW_TOKENS = 200  # default max_new_tokens, reduced if the text must fit the context
SEED = 1337  # default seed for sampling


@dataclass(frozen=True)
class SamplingParams(Section):
    """Sampling parameters. `jaxgpt.generate` and `jaxgpt sample` have the same defaults.

    Filters are applied in this order, as in transformers: repetition penalty, n-grams, temperature, top-k, top-p, min-p.
    """

    temperature: float = setting(0.8, "divide the logits by this; 0: take the most probable token", 0.0)
    top_k: int = setting(0, "keep the k most probable tokens; 0: off", 0)
    top_p: float = setting(1.0, "keep the smallest set of tokens with total probability >= p; 1: off", 0.0, 1.0)
    min_p: float = setting(0.0, "drop tokens less probable than min_p x the top probability; 0: off", 0.0, 1.0)
    repetition_penalty: float = setting(
        1.0, "for tokens in the text, divide positive logits and multiply negative logits by this; 1: off", above=0.0
    )
    no_repeat_ngram_size: int = setting(0, "forbid a second occurrence of n-grams of this size; 0: off", 0, MAX_TOKENS)

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled at random."""
        return self.temperature > 0


@dataclass(frozen=True)
class TextParams(Section):
    """Length and end of a generated text, and prompt lookup."""

    max_new_tokens: int | None = setting(
        None, "maximum number of new tokens; default: 200, fewer if the text must fit the context", 1, MAX_TOKENS
    )
    max_length: int | None = setting(
        None, "maximum number of tokens including the prompt, instead of max_new_tokens", 1, MAX_TOKENS
    )
    stop: tuple[str, ...] = setting((), "end the text before the first of these strings")
    stop_ids: tuple[int, ...] = setting((), "end the text before the first of these ids; end-of-text ids always end it")
    overflow: Literal["auto", "error", "slide"] = setting(
        "auto", "beyond the context, error: fail; slide: slide the window; auto: continue with RoPE, otherwise fail"
    )
    lookup: int = setting(0, "prompt lookup: length of the n-grams that draft the next tokens; 0: off", 0, 64)

    def converted(self) -> Mapping[str, Any]:
        """Return `stop_ids` as a tuple of `int`; a single id and NumPy integers are accepted."""
        ids = self.stop_ids if isinstance(self.stop_ids, Iterable) else (self.stop_ids,)
        return {"stop_ids": tuple(as_int("a stop id", i, -(2**63), 2**63 - 1) for i in ids)}

    def check(self) -> Iterator[str]:
        if self.max_new_tokens is not None and self.max_length is not None:
            yield "max_length includes the prompt and cannot be combined with max_new_tokens: omit one of them"


@dataclass(frozen=True)
class BeamParams(Section):
    """Parameters of beam search, and the number of texts per prompt."""

    num_beams: int = setting(1, "number of beams; 1: sampling; above 1: deterministic beam search", 1, MAX_ROWS)
    num_return_sequences: int = setting(1, "texts to return per prompt: samples, or the best beams", 1, MAX_ROWS)
    length_penalty: float = setting(1.0, "rank beams by log p / length ** length_penalty", -5.0, 5.0)
    early_stopping: bool | Literal["true", "false", "never"] = setting(
        False,
        "true: stop at num_beams finished texts; false: if a better text is unlikely; never: if a better text is impossible",
    )

    def converted(self) -> Mapping[str, Any]:
        """Return `early_stopping` as a bool if it is the word true or false, as on the command line."""
        words = {"true": True, "false": False}
        return {"early_stopping": words.get(str(self.early_stopping).lower(), self.early_stopping)}

    def check(self) -> Iterator[str]:
        if self.num_beams > 1 and self.num_return_sequences > self.num_beams:
            yield f"num_return_sequences {self.num_return_sequences} exceeds num_beams {self.num_beams}: lower it"
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            yield f"early_stopping must be true, false or never: {short_repr(self.early_stopping)}"
        if self.num_beams == 1:
            for name, default in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != default:
                    yield f"{name} {getattr(self, name)} has no effect without beams: omit it, or raise num_beams above 1"
