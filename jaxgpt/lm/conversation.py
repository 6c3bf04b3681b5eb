"""Conversations: render messages, generate an answer, and keep the KV cache for the next answer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax

from jaxgpt.config import SamplingParams, TextParams
from jaxgpt.data.chat.encoding import ChatFormat, chat_format
from jaxgpt.data.chat.template import Message, check_messages
from jaxgpt.decoding.sampler import SamplerState
from jaxgpt.errors import UserError
from jaxgpt.lm.arguments import as_tuple, make_settings, row_keys
from jaxgpt.lm.defaults import with_defaults
from jaxgpt.lm.generation import STREAM_BLOCK, decode
from jaxgpt.lm.model import LM, check_lm
from jaxgpt.lm.request import Request, read_request
from jaxgpt.lm.results import Generation, Piece
from jaxgpt.lm.reuse import plan_reuse
from jaxgpt.lm.sampler import for_decoding
from jaxgpt.options import SEED
from jaxgpt.settings import MAX_TOKENS, as_int

ANSWER_TOKENS = 512  # default maximum number of tokens of an answer


class Chat:
    """A conversation with a model. `answer` adds a message and streams the answer.

    Attributes:
        messages: the messages so far, dicts with `role` and `content`.
        reused: number of leading tokens of the last prompt in the cache of the previous turn; 0 if reuse saves no
            computation.
        prompt_tokens: number of tokens of the last prompt, the rendered messages.
        warning: a line if the end of the assistant's turn is unknown, so that answers may not stop; otherwise "".
    """

    def __init__(
        self,
        lm: LM,
        messages: Sequence[Message] = (),
        *,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start or continue a conversation.

        Args:
            lm: a model with a chat template.
            messages: the messages so far, `[{"role": "system", "content": "Be brief."}, ...]`.
            tools: descriptions of functions for the template, as JSON values; None: no tools.
            chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`, in addition to the
                variables that the model was fine-tuned with.

        Raises:
            UserError: if `lm` is not an LM with a chat template, or the messages or variables are malformed.
        """
        check_lm(lm)
        self._format = _format(lm, chat_template_kwargs, with_tools=tools is not None)
        self.warning = self._format.warning
        self._tools = tools
        self._lm = for_decoding(lm)
        self._state: SamplerState | None = None  # state after the last piece; None: nothing to reuse
        self._answering: Generator[Piece, None, None] | None = None  # pieces of the last answer
        self.messages = check_messages(messages) if messages else []
        self.prompt_tokens = 0
        self.reused = 0

    def answer(
        self,
        message: str | Message,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        key: int | jax.Array = SEED,
        **sampling: Any,
    ) -> Generator[Piece, None, None]:
        """Answer a message; yield the answer in pieces. The last piece has `done` set.

        When the iterator ends, the message and the answer are added to `messages`, except after an error. Closing the
        iterator after the first piece adds the message and the pieces so far; the next call closes the iterator.

        Args:
            message: a user's text, or a message such as `{"role": "tool", "content": "22 degrees"}`. Names of special
                tokens in a message are encoded as ordinary text.
            max_new_tokens: maximum number of tokens of the answer, as in `chat`.
            stop: strings that end the answer, excluded from it.
            key: a seed, or a `jax.random.key`.
            **sampling: fields of `SamplingParams`.

        Raises:
            UserError: if the conversation fills the context, the template rejects the messages, an argument is invalid,
                memory is insufficient, or a logit is NaN.
        """
        if self._answering is not None:
            self._answering.close()  # adds the last answer to the messages, which are read below
        [params] = make_settings(with_defaults(self._lm.tokenizer, sampling), SamplingParams)
        messages = self._with_message(message)
        ids = self._format.prompt_ids(messages, self._tools)
        request = read_request(self._lm, [ids], self._limits(len(ids), max_new_tokens, stop))
        request = request.decoded_alone(self._lm.tokenizer)
        self._answering = self._pieces(messages, request, params, row_keys(key, 1))
        return self._answering

    def _with_message(self, message: str | Message) -> list[dict[str, Any]]:
        """Return the messages with a new message; raise `UserError` if it is malformed, or is not a message to answer."""
        added = {"role": "user", "content": message} if isinstance(message, str) else message
        messages = check_messages([*self.messages, added])
        if messages[-1]["role"] in ("assistant", "system"):
            role = messages[-1]["role"]
            raise UserError(f"the last message has the role {role}: end with a message to answer, such as a user's")
        return messages

    def _limits(self, prompt_tokens: int, max_new_tokens: int | None, stop: str | Sequence[str]) -> TextParams:
        """Return the settings that end an answer: maximum length or context, stop strings, and the end of the turn.

        Raises:
            UserError: if the prompt fills the context, or an argument is invalid.
        """
        context = self._lm.config.model.block_size
        if prompt_tokens >= context:
            raise UserError(
                f"the conversation has {prompt_tokens:,} tokens, and the model's context is {context:,}: shorten the "
                f"messages, or start a new conversation (/reset in jaxgpt chat)"
            )
        longest = ANSWER_TOKENS if max_new_tokens is None else as_int("max_new_tokens", max_new_tokens, 1, MAX_TOKENS)
        end = self._format.end
        stops = as_tuple(stop)
        if end.stop:
            stops = (*stops, end.stop)
        stop_ids = () if end.stop_id is None else (end.stop_id,)
        return TextParams(max_new_tokens=min(longest, context - prompt_tokens), stop=stops, stop_ids=stop_ids)

    def _pieces(
        self, messages: list[dict[str, Any]], request: Request, sampling: SamplingParams, key_1: jax.Array
    ) -> Generator[Piece, None, None]:
        """Generate the answer to `messages`, and add both to the conversation."""
        texts = []
        try:
            for piece in self._generated(request, sampling, key_1):
                texts.append(piece.text)
                yield piece
        except Exception:
            texts.clear()  # the messages remain unchanged
            raise
        finally:
            if texts:  # a complete answer, or a partial answer after the generator was closed or interrupted
                content = self._format.content("".join(texts))
                self.messages = [*messages, {"role": "assistant", "content": content}]

    def _generated(self, request: Request, sampling: SamplingParams, key_1: jax.Array) -> Generator[Piece, None, None]:
        """Generate the text of a request from the cache of the previous answer, and keep the cache for the next answer."""
        [prompt] = request.inputs
        [limit] = request.limits
        reuse = None if self._state is None else plan_reuse(self._state, prompt, limit)
        self.prompt_tokens = len(prompt)
        self.reused = 0 if reuse is None else reuse.tokens

        # The state can be reused only while the caller has a piece: the computation of the next piece donates the state.
        # Without reuse, the cache of the previous answer is freed here.
        self._state = None
        for piece, state in decode(request, request.make_sampler(sampling), key_1, STREAM_BLOCK, reuse=reuse):
            self._state = state
            yield piece
            self._state = None
        self._state = state


def chat(
    lm: LM,
    messages: Sequence[Message],
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int | None = None,
    stop: str | Sequence[str] = (),
    key: int | jax.Array = SEED,
    **sampling: Any,
) -> Generation:
    """Answer the last message of a conversation.

    Example: `chat(lm, [{"role": "user", "content": "Hi"}]).text`. For several turns, `jaxgpt.lm.Chat` keeps the key/value
    cache between turns.

    Args:
        lm: model with a chat template.
        messages: dicts with a `role` (system, user, assistant, tool or another role of the template) and a `content`. The
            last is a message to answer, such as a user's or a tool's. Names of special tokens in its content are
            encoded as ordinary text.
        tools: descriptions of functions for the template, as JSON values; None: no tools.
        chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`, in addition to the variables
            that the model was fine-tuned with.
        max_new_tokens: maximum number of tokens of the answer; None: 512. The end of the context also ends the answer.
        stop: strings that end the answer, excluded from it. The end of the turn in the template, and the model's
            end-of-text ids, always end the answer.
        key: a seed, or a `jax.random.key`.
        **sampling: fields of `SamplingParams`; if not given, from the model's generation_config.json, as in `generate`.

    Raises:
        UserError: if the chat template is missing or rejects the messages, the messages fill the context, an argument is
            invalid, memory is insufficient, or a logit is NaN.
    """
    *before, last = check_messages(messages)
    conversation = Chat(lm, before, tools=tools, chat_template_kwargs=chat_template_kwargs)
    *_, end = conversation.answer(last, max_new_tokens=max_new_tokens, stop=stop, key=key, **sampling)
    assert end.done is not None
    return end.done


def _format(lm: LM, variables: Mapping[str, Any] | None, with_tools: bool) -> ChatFormat:
    """Return the chat format of a model; raise `UserError` if it has no default chat template."""
    form = chat_format(lm.tokenizer, lm.config.data, variables, with_tools=with_tools)
    if form is None and lm.tokenizer.special.templates:
        names = ", ".join(lm.tokenizer.special.templates)
        raise UserError(
            f"{lm.source or 'the model'} has no chat template named default, only {names}: add one to the model"
        )
    if form is None:
        raise UserError(
            f"{lm.source or 'the model'} has no chat template: import an instruction-tuned model, or continue "
            f"text with jaxgpt sample RUN --prompt TEXT"
        )
    return form
