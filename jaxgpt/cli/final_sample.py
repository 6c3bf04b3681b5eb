"""The sample at the end of a training run: its prompt, its text, and the command that samples again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxgpt.config import Config, TrainConfig
from jaxgpt.data import Data, Packed, Preferences, PromptSplit, Split
from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.bos import decode_texts
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, generate
from jaxgpt.lm.arguments import encode_prompt
from jaxgpt.lm.mesh_part import one_copy
from jaxgpt.trainer.program import Program

QUOTES = set("'\"`\\$!")  # characters that make a word hard to read in a command; such words are skipped
LINE = 256  # maximum number of tokens decoded to find a line for the default prompt
WORDS = 4  # maximum number of words of the default prompt
LETTERS = 40  # maximum number of characters of the default prompt


def first_prompt(config: Config, tokenizer: Tokenizer, split: Split, bos_ids: Sequence[int] = ()) -> list[int]:
    """Return the ids of `train.prompt`; if they exceed the context, truncate them to half its length.

    The default prompt consists of the first words of a line of the validation data. For conversations, preference pairs and
    prompts, the default is the text before the first answer. `bos_ids`: beginning-of-text ids that the data record.
    """
    prompt = config.train.prompt
    if prompt == TrainConfig.prompt:
        if isinstance(split, Packed | Preferences | PromptSplit):
            before_target = split.prompt()
            if len(before_target):
                return before_target.tolist()
        prompt = _first_words(tokenizer, split, bos_ids)
    encoded = encode_prompt(tokenizer, tokenizer.vocab_size, prompt)
    context = config.model.block_size
    if len(encoded) <= context:
        return encoded
    return encoded[: max(context // 2, 1)]


def check_prompt(config: Config, tokenizer: Tokenizer) -> None:
    """Raise `UserError` if the final sample needs `train.prompt`, and the tokenizer cannot encode it."""
    train = config.train
    if not train.sample_tokens or train.prompt == TrainConfig.prompt:
        return
    try:
        encode_prompt(tokenizer, tokenizer.vocab_size, train.prompt)
    except UserError as e:
        raise UserError(f"train.prompt: {e}") from None


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


def final_sample(program: Program, tokenizer: Tokenizer, params: Any, ids: list[int]) -> str:
    """Return the text of a prompt and its sampled continuation."""
    config = program.config
    lm = one_copy(LM(config, params, tokenizer))
    tokens = config.train.sample_tokens
    if config.model.positions != "rope":
        tokens = min(tokens, config.model.block_size - max(len(ids), 1) + 1)
    [out] = generate(lm, [ids or ""], max_new_tokens=tokens, key=config.train.seed)
    return tokenizer.decode([*without_bos(tokenizer, ids), *out.ids])


def sample_end(config: Config, data: Data) -> str:
    """Return the line after the sample; for conversations, pairs and prompts, it contains the answer in the data."""
    val = data.val
    if config.train.prompt != TrainConfig.prompt or not isinstance(val, Packed | Preferences | PromptSplit):
        return "---"
    answer = data.tokenizer.decode(val.answer())
    return f"--- the data continue with {answer!r} ---" if answer else "---"


def sample_command(run: Path, prompt: str) -> str:
    """Return the command that samples from a run, quoted for a shell."""
    words = ["jaxgpt", "sample", str(run)]
    if prompt.startswith("-"):
        words.append(f"--prompt={prompt}")
    elif prompt.strip():
        words += ["--prompt", prompt]
    return shlex.join(words)
