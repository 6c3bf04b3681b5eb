"""A model for lm-evaluation-harness. This module imports the package `lm_eval` (the extra `eval`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from jaxgpt.data.chat_encoding import chat_format
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.tasks import answers, requests
from jaxgpt.tasks.requests import Continuation, Count, no_count

NEW_TOKENS = 256  # the harness' own default for answers

PLACEHOLDER = "\ue000"  # a character for private use


class TaskModel(TemplateLM):
    """An `LM` as a model of the harness, with the same results as the harness' model `hf` for the exported model.

    Args:
        lm: model.
        count: callback with the number of finished requests of a kind, and the total; its exceptions end the evaluation.
    """

    backend = "causal"

    def __init__(self, lm: LM, count: Count = no_count) -> None:
        super().__init__()
        self.lm = lm
        self.count = count

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        eos = self.lm.tokenizer.eos_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        return requests.prefix_id(self.lm)

    @property
    def tokenizer_name(self) -> str:
        """Name of the model in the harness' cache of requests."""
        return self.lm.source.replace("/", "__") or "jaxgpt"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text; by default, after the tokenizer's beginning-of-text ids."""
        return requests.encode(self.lm, string, with_start=add_special_tokens is not False)

    def loglikelihood(self, requests_: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log probability of each choice, and whether greedy decoding would produce it."""
        return super().loglikelihood(requests_, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests_: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        choices = [Continuation(context, ids) for _, context, ids in requests_]
        return requests.answer_choices(self.lm, choices, self.count)

    def loglikelihood_rolling(self, requests_: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each complete text, in nats."""
        texts = [self.tok_encode(request.args[0]) for request in requests_]
        return requests.answer_texts(self.lm, texts, self.count)

    def generate_until(self, requests_: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated answers."""
        prompts = []
        for request in requests_:
            text, settings = request.args
            prompts.append(answers.as_prompt(text, normalize_gen_kwargs(settings, NEW_TOKENS)))
        return answers.answer_prompts(self.lm, prompts, self.count)

    def chat_template(self, chat_template: bool | str = False) -> str:
        """Return the Jinja source of the chat template."""
        return self.lm.tokenizer.special.chat_template or ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render messages. Without a generation prompt, the text ends with the content of the last message.

        As in the harness, a template that rejects system messages gets the other messages.

        Raises:
            UserError: if the model has no chat template, or the template rejects the messages or rewrites the last message.
        """
        try:
            return self._render(chat_history, add_generation_prompt)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return self._render(others, add_generation_prompt)

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Render messages; raise the errors of `apply_chat_template`."""
        form = chat_format(self.lm.tokenizer, self.lm.config.data)
        if form is None:
            raise UserError(
                f"{self.lm.source or 'the model'} has no chat template: omit --chat-template, or use a model for chats"
            )
        text = form.template.render(messages, add_generation_prompt=add_generation_prompt).text
        if add_generation_prompt:
            return text
        # The template may keep or drop white space at the end of the content. The text after the content, such as <|im_end|>,
        # may contain it, too: this text follows a placeholder in its place.
        *before, last = messages
        probed = form.template.render([*before, {**last, "content": PLACEHOLDER}]).text
        _, _, after = probed.rpartition(PLACEHOLDER)
        limit = len(text) - len(after) if text.endswith(after) else len(text)
        content = last["content"].lstrip()
        begin = text.rfind(content.rstrip(), 0, limit)
        if begin < 0:
            raise UserError(
                f"the chat template of {self.lm.source or 'the model'} rewrites the last message: prompts must end with its "
                "content; omit --chat-template, or use a template that keeps the content"
            )
        if not text.startswith(content, begin):
            content = content.rstrip()
        return text[: begin + len(content)]
