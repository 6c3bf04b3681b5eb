"""The sample at the end of a training run: its prompt, its text, and the command that samples again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxgpt.config import Config, TrainConfig
from jaxgpt.data import Packed, Preferences, PromptSplit, Split
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.joined_texts import decode_texts
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import encode_prompt
from jaxgpt.lm.mesh_part import one_copy
from jaxgpt.trainer.program import Program

QUOTES = set("'\"`\\$!")  # words with these characters, hard to read in a command, are skipped if possible
LINE = 256  # maximum number of tokens decoded to find a line for the default prompt
WORDS = 4  # maximum number of words of the default prompt
LETTERS = 40  # maximum number of characters of the default prompt


def check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the final sample needs `train.prompt`, and the tokenizer cannot encode it."""
    train = config.train
    if not train.sample_tokens or train.prompt == TrainConfig.prompt:
        return
    try:
        encode_prompt(tokenizer, tokenizer.vocab_size, train.prompt)
    except UserError as e:
        raise UserError(f"train.prompt: {e}") from None


class FinalPrompt(NamedTuple):
    """The prompt of the final sample.

    Attributes:
        ids: ids of the prompt, with the beginning-of-text ids of the tokenizer.
        text: text of the prompt, without the beginning of text: the value of `jaxgpt sample --prompt`.
        answer: the answer to the prompt in the data; "": the data have no answer to this prompt.
    """

    ids: list[int]
    text: str
    answer: str


def final_prompt(config: Config, tokenizer: Tokenizer, split: Split, bos_ids: Sequence[int] = ()) -> FinalPrompt:
    """Return the prompt of the final sample: `train.prompt`, truncated to half the context if it exceeds the context.

    For conversations, preference pairs and prompts, the default is the text before the first answer, never truncated. For
    other data, or if this text is empty, the default consists of the first words of a line of the validation data.

    Args:
        config: settings of the run.
        tokenizer: tokenizer of the run.
        split: validation data.
        bos_ids: beginning-of-text ids that the data record.

    Raises:
        UserError: if the tokenizer cannot encode the prompt.
    """
    prompt = config.train.prompt
    is_default = prompt == TrainConfig.prompt
    if is_default and isinstance(split, Packed | Preferences | PromptSplit):
        ids = split.prompt().tolist()
        if ids:
            text = tokenizer.decode(without_bos(tokenizer, ids))
            return FinalPrompt(ids, text, answer=tokenizer.decode(split.answer()))
    if is_default:
        prompt = _first_words(tokenizer, split, bos_ids)

    ids = encode_prompt(tokenizer, tokenizer.vocab_size, prompt)
    context = config.model.block_size
    if len(ids) > context:
        ids = ids[: max(context // 2, 1)]
    text = tokenizer.decode(without_bos(tokenizer, ids))
    return FinalPrompt(ids, text, answer="")


def _first_words(tokenizer: Tokenizer, split: Split, bos_ids: Sequence[int]) -> str:
    """Return the first words of a line; words with quotes are skipped if possible."""
    ids = split.take(0, min(len(split), LINE))
    first, *others = decode_texts(tokenizer, ids, bos_ids).split("\n")
    # Skip the first line if possible: it may be incomplete.
    line = next((line for line in others if line.strip()), first)
    words = line.split()
    without_quotes = [word for word in words if not QUOTES.intersection(word)]
    return " ".join((without_quotes or words)[:WORDS])[:LETTERS]


def without_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return the ids of a prompt without the ids that `jaxgpt sample` prepends to it."""
    bos = list(tokenizer.bos_ids)
    return ids[len(bos) :] if ids[: len(bos)] == bos else ids


def final_sample(program: Program, tokenizer: Tokenizer, params: Any, prompt: FinalPrompt) -> str:
    """Return the text of a prompt and its sampled continuation."""
    config = program.config
    lm = one_copy(LM(config, params, tokenizer))
    tokens = config.train.sample_tokens
    if config.model.positions != "rope":
        tokens = min(tokens, config.model.block_size - max(len(prompt.ids), 1) + 1)
    [out] = generate(lm, [prompt.ids or ""], max_new_tokens=tokens, key=config.train.seed)
    return tokenizer.decode([*without_bos(tokenizer, prompt.ids), *out.ids])


def sample_command(run: Path, prompt: str) -> str:
    """Return the command that samples from a run, quoted for a shell."""
    words = ["jaxgpt", "sample", str(run)]
    if prompt.startswith("-"):
        words.append(f"--prompt={prompt}")
    elif prompt.strip():
        words += ["--prompt", prompt]
    return shlex.join(words)
