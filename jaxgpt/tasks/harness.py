"""A model for lm-evaluation-harness. This module imports the package `lm_eval` (the extra `eval`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from jaxgpt.data.chat.encoding import chat_format
from jaxgpt.data.chat.template import ChatTemplate
from jaxgpt.errors import UserError
from jaxgpt.lm import LM
from jaxgpt.progress import NO_PROGRESS, Progress
from jaxgpt.tasks.answers import answer_prompts, as_prompt
from jaxgpt.tasks.requests import Continuation, answer_choices, answer_texts, encode, prefix_id

NEW_TOKENS = 256  # default `max_gen_toks` of the harness
PLACEHOLDER = "\ue000"  # a private-use character that replaces the content of a message


class TaskModel(TemplateLM):
    """An `LM` as a model of the harness, with the same results as the harness' model `hf` for the exported model.

    Args:
        lm: model.
        progress: called with the number of finished requests of a kind, and the total; its exceptions end the evaluation.
    """

    backend = "causal"

    def __init__(self, lm: LM, progress: Progress = NO_PROGRESS) -> None:
        super().__init__()
        self.lm = lm
        self.progress = progress

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text; without such an id, `prefix_token_id`."""
        eos = self.lm.tokenizer.eos_id
        return self.prefix_token_id if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """The id that the model reads before a text without context."""
        return prefix_id(self.lm)

    @property
    def tokenizer_name(self) -> str:
        """Name of the model in the harness' cache of requests."""
        return self.lm.source.replace("/", "__") or "jaxgpt"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode a text; by default, after the tokenizer's beginning-of-text ids."""
        return encode(self.lm, string, with_start=add_special_tokens is not False)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return the log probability of each choice, and whether greedy decoding would produce it."""
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        choices = [Continuation(context, ids) for _, context, ids in requests]
        return answer_choices(self.lm, choices, self.progress)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log probability of each complete text, in nats."""
        texts = [self.tok_encode(request.args[0]) for request in requests]
        return answer_texts(self.lm, texts, self.progress)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the generated answers."""
        prompts = []
        for request in requests:
            text, settings = request.args
            prompts.append(as_prompt(text, normalize_gen_kwargs(settings, NEW_TOKENS)))
        return answer_prompts(self.lm, prompts, self.progress)

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
            return self._prompt(chat_history, add_generation_prompt)
        except UserError:
            others = [message for message in chat_history if message["role"] != "system"]
            if len(others) == len(chat_history):
                raise
            return self._prompt(others, add_generation_prompt)

    def _prompt(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool) -> str:
        """Render messages as `apply_chat_template` does, including system messages."""
        template = self._template()
        if add_generation_prompt:
            return template.render(messages, add_generation_prompt=True).text
        prompt = _up_to_content(template, messages)
        if prompt is None:
            raise UserError(
                f"the chat template of {self.lm.source or 'the model'} rewrites the last message: prompts must end with its "
                "content; omit --chat-template, or use a template that keeps the content"
            )
        return prompt

    def _template(self) -> ChatTemplate:
        form = chat_format(self.lm.tokenizer, self.lm.config.data)
        if form is None:
            raise UserError(
                f"{self.lm.source or 'the model'} has no chat template: omit --chat-template, or use a chat model"
            )
        return form.template


def _up_to_content(template: ChatTemplate, messages: Sequence[Mapping[str, str]]) -> str | None:
    """Render messages without the text after the content of the last message; None: the text does not contain the content.

    The template may drop white space at both ends of the content. For example, for the content "Yes":

        ...<|im_start|>assistant\\nYes<|im_end|>\\n  ->  ...<|im_start|>assistant\\nYes
    """
    text = template.render(messages, add_generation_prompt=False).text

    # Render a placeholder to find the text after the content, which may contain the content as well.
    *before, last = messages
    placeholder = {**last, "content": PLACEHOLDER}
    with_placeholder = template.render([*before, placeholder], add_generation_prompt=False).text
    _, found, after = with_placeholder.rpartition(PLACEHOLDER)
    if not found:
        return None

    content = last["content"]
    begin = text.removesuffix(after).rfind(content.strip())
    if begin < 0:
        return None
    kept = content.lstrip()
    if not text.startswith(kept, begin):  # the template drops white space after the content
        kept = kept.rstrip()
    return text[: begin + len(kept)]
