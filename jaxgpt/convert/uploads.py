"""Files of an earlier export in a repository of the hub, which an upload replaces or deletes."""

from __future__ import annotations

from jaxgpt.convert.files import INDEX, SINGLE
from jaxgpt.directories import (
    ADDED_TOKENS,
    CHAT_TEMPLATE,
    CHAT_TEMPLATES,
    GENERATION_CONFIG,
    SPECIAL_TOKENS_MAP,
    TOKENIZER_CONFIG,
)

# Glob patterns of files that transformers reads with an export, or instead of it: files of an earlier model would change the
# loaded model.
OF_TOKENIZERS = (
    GENERATION_CONFIG,
    TOKENIZER_CONFIG,
    CHAT_TEMPLATE,
    f"{CHAT_TEMPLATES}/*.jinja",
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
)
OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
OF_MODELS = (SINGLE, INDEX, "model-*-of-*.safetensors", "pytorch_model.bin*", "pytorch_model-*-of-*.bin")


def replaced_files(is_adapter: bool) -> tuple[str, ...]:
    """Return glob patterns of the files that the upload of a model or adapter replaces.

    An adapter does not replace a model in the repository. A model replaces an adapter, because the adapter would change the
    model.
    """
    if is_adapter:
        return (*OF_TOKENIZERS, *OF_ADAPTERS)
    return (*OF_TOKENIZERS, *OF_ADAPTERS, *OF_MODELS)
