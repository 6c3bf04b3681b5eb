"""Settings of the data of a run: text, tokenizer, mixtures and training windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from jaxgpt.mix import Phase, integer_weights, join_phases, split_phases
from jaxgpt.settings import MAX_VOCAB, Section, setting
from jaxgpt.template_variables import parse_variables

FROM_TEXT = ("char", "word", "bpe")  # tokenizers built from the training text
NAMED_TOKENIZERS = (*FROM_TEXT, "byte", "gpt2", "ids")  # values of data.tokenizer that are not paths
OF_CHATS = ("chat_template_kwargs", "answer_tokens")  # settings of `data` that a run inherits with its weights


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Text, tokenizer and training windows."""

    prefix = "data"

    dataset: Literal["python", "shakespeare", "statquest", "repeats", "none"] = setting(
        "python", "built-in text to use when no path is given"
    )
    path: str = setting(
        "",
        "file or directory of text, tokens (.bin), or conversations, pairs or prompts (.jsonl, .json, .parquet); empty: use "
        "data.dataset",
        private=True,
    )
    mix: tuple[str, ...] = setting(
        (),
        "paths with their shares of the training windows: web=0.7 code=0.3; @TOKENS: start of the next mixture",
        private=True,
    )
    tokenizer: str = setting(
        "char", "char, word, byte, gpt2, ids, bpe (trained on the text), or the path of a tokenizer.json", private=True
    )
    vocab_size: int = setting(4096, "maximum vocabulary size of a BPE tokenizer trained on the text", 2, MAX_VOCAB)
    train_fraction: float = setting(
        0.9,
        "leading fraction of the data to train on, if no files are for validation; 1: train and evaluate on all data",
        above=0.0,
        high=1.0,
    )
    on_error: Literal["fail", "skip"] = setting(
        "fail", "on unusable conversations, pairs or prompts: fail, or skip and count them"
    )
    sampling: Literal["epoch", "random"] = setting(
        "epoch", "epoch: draw windows without replacement; random: draw each window independently"
    )
    window: int = setting(0, "T, tokens per training window; 0: model.block_size", 0, 2**24)
    stride: int = setting(0, "tokens between starts of windows; 0: the window length, with a new offset each epoch", 0)
    documents: Literal["flow", "mask", "pack"] = setting(
        "flow",
        "flow: concatenate documents; mask: attention and targets end at their boundaries; pack: as mask, and documents are "
        "split only if necessary",
    )
    bos: Literal["auto", "yes", "no"] = setting(
        "auto", "begin texts, pairs and prompts with the beginning-of-text token; auto: if the tokenizer prepends it"
    )
    chat_template_kwargs: str = setting("", 'variables of the chat template, as JSON: {"enable_thinking": false}')
    answer_tokens: tuple[str, ...] = setting(
        (), "added tokens, special or not, that stay tokens in the assistant's messages, such as <think> </think>"
    )

    def check(self) -> Iterator[str]:
        parse_variables(self.chat_template_kwargs, "data.chat_template_kwargs")  # raises an error if they are invalid
        if self.stride and self.documents == "pack":
            yield f"data.stride {self.stride} does not apply to packed documents (data.documents pack): set it to 0"
        if self.path and self.begins_with_mixture:
            yield f"data.path {self.path} and data.mix both specify the data: omit one of them"
        for phase in self.phases:
            self.weights(phase)  # raises an error if the words are invalid

    def with_values(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with changed values, keyed by field.

        A new path removes the mixtures, unless `values` has both. New mixtures remove the path, unless `values` has both, or
        training begins with the path, before the first mixture.
        """
        new = dict(values)
        if "path" in values:
            new.setdefault("mix", ())
        elif "mix" in values and DataConfig(mix=values["mix"]).begins_with_mixture:
            new["path"] = ""
        return super().with_values(new)

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables in `chat_template_kwargs`."""
        return parse_variables(self.chat_template_kwargs, "data.chat_template_kwargs")

    @property
    def phases(self) -> list[Phase]:
        """The mixtures of the run, in order; without `mix`, a single phase without words."""
        return split_phases(self.mix)

    @property
    def begins_with_mixture(self) -> bool:
        """Whether `mix` replaces `path` and `dataset` from the first step."""
        return bool(self.phases[0].words)

    def weights(self, phase: Phase) -> dict[str, int]:
        """Return the integer weight of each path of a phase; the built-in text has an empty path."""
        return integer_weights(phase.words) if phase.words else {self.path: 1}

    @property
    def sources(self) -> list[DataConfig]:
        """The settings of each source, in order of first use."""
        paths = dict.fromkeys(path for phase in self.phases for path in self.weights(phase))
        return [replace(self, path=path, mix=()) for path in paths]

    def remaining_sources(self, tokens: int) -> list[DataConfig]:
        """Return the settings of the sources of the mixtures that have not ended after `tokens` training tokens."""
        *_, current = [index for index, phase in enumerate(self.phases) if phase.tokens <= tokens]
        needed = {path for phase in self.phases[current:] for path in self.weights(phase)}
        return [each for each in self.sources if each.path in needed]

    @property
    def stream_names(self) -> dict[str, str]:
        """The name of the random stream of each source, keyed by path. A source keeps its stream when the mixture changes."""
        numbered = {each.path: f" of source {number}" for number, each in enumerate(self.sources)}
        return numbered if self.begins_with_mixture else numbered | {self.path: ""}

    def with_phases(self, phases: Sequence[Phase]) -> DataConfig:
        """Return a copy with these mixtures; a first phase without words is the data of `path`, or the built-in text."""
        path = "" if phases[0].words else self.path
        return replace(self, path=path, mix=join_phases(phases))

    def with_last_mixture(self) -> DataConfig:
        """Return a copy with only the last mixture."""
        *_, phase = self.phases
        return self.with_phases([Phase(0, phase.words)])

    def with_mixtures_before(self, tokens: int) -> DataConfig:
        """Return a copy with only the mixtures of the first `tokens` training tokens."""
        first, *others = self.phases
        return self.with_phases([first, *(phase for phase in others if phase.tokens < tokens)])
