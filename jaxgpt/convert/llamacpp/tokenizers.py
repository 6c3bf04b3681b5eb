"""Tokenizers that llama.cpp's converter of transformers directories recognizes.

`convert_hf_to_gguf.py` encodes a fixed text, and looks up the SHA-256 of the ids, so it recognizes published
vocabularies and rejects all others. Source: `get_vocab_base_pre` in llama.cpp (package convert-hf-to-gguf 0.1.1).
"""

from __future__ import annotations

import hashlib
import json

from jaxgpt.data.tokenizers.base import Tokenizer
from jaxgpt.data.tokenizers.subword import SubwordTokenizer

TEXT = (
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n\U0001f680 (normal) \U0001f636\u200d\U0001f32b"
    "\ufe0f (multiple emojis concatenated) \u2705 \U0001f999\U0001f999 3 33 333 3333 33333 333333 33333"
    "33 33333333 3.3 3..3 3...3 \u1780\u17b6\u1793\u17cb\u178f\u17c2\u1796\u17b7\u179f\u17c1\u179f"
    "\u17a2\u17b6\u1785\U0001f601 ?\u6211\u60f3\u5728apple\u5de5\u4f5c1314151\u5929\uff5e ------======="
    " \u043d\u0435\u0449\u043e \u043d\u0430 \u0411\u044a\u043b\u0433\u0430\u0440\u0441\u043a\u0438 ''''"
    "''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not sure I'll"
    " make it, 'D you like some tea? We'Ve a'lL"
)
# SHA-256 of `str(ids)` of the text, and llama.cpp's name, for vocabularies of the families that jaxgpt exports.
RECOGNIZED = {
    "3ce83efda5659b07b1ad37ca97ca5797ea4285d9b9ab0dc679e4a720c9da7454": "gpt-2",
    "0fe1cf6eda062318a1af7270f3331a85c539a01778ff948e24388e949c5282f4": "gpt-2",
    "0ef9807a4087ebef797fc749390439009c3b9eda9ad1a097abbe738f486c01e5": "llama-bpe",
    "c136ed14d01c2745d4f60a9596ae66800e2b61fa45643e72436041855ad4089d": "smaug-bpe",
    "855059429035d75a914d1eda9f10a876752e281a054a7a3d421ef0533e5b6249": "smollm",
    "e636dc30a262dcc0d8c323492e32ae2b70728f4df7dfe9737d9f920a282b8aea": "qwen2",
    "d4540891389ea895b53b399da6ac824becc30f2fba0e9ddbb98f92e55ca0e97c": "qwen2",
    "b3f499bb4255f8ca19fccd664443283318f2fd2414d5e0b040fbdd0cc195d6c5": "deepseek-r1-qwen",
    "049ecf7629871e3041641907f3de7c733e4dbfdc736f57d882ba0b0845599754": "deepseek-llm",
    "347715f544604f9118bb75ed199f68779f423cabb20db6de6f31b908d04d7821": "deepseek-coder",
    "b6dc8df998e1cfbdc4eac8243701a65afe638679230920b50d6f17d81c098166": "olmo",
    "63b97e4253352e6f357cc59ea5b583e3a680eaeaf2632188c2b952de2588485e": "tekken",
    "bc01ce58980e1db43859146dc51b1758b3b88729b217a74792e9f8d43e479d21": "gpt3-finnish",
    "a8594e3edff7c29c003940395316294b2c623e09894deebbc65f33f1515df79e": "dbrx",
}


def is_recognized(tokenizer: Tokenizer, family: str) -> bool:
    """Return whether the converter accepts a tokenizer in an exported model of a family, by its `model_type`."""
    if not isinstance(tokenizer, SubwordTokenizer):
        return False
    content = json.loads(tokenizer.to_json())
    decoder = content["decoder"] or {}
    if family in ("llama", "mistral") and content["model"].get("byte_fallback") and decoder.get("type") == "Sequence":
        return content["model"]["type"] == "BPE"  # a SentencePiece vocabulary, as in Llama 2
    ids = tokenizer.library.encode(TEXT).ids
    return hashlib.sha256(str(ids).encode()).hexdigest() in RECOGNIZED
