"""The section of a model card that shows how to load the model, in each program that supports it."""

from __future__ import annotations

from collections.abc import Sequence

from jaxgpt.convert.engines import Engine

LOAD_MODEL = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}")
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

```sh
jaxgpt import {name} runs/{run}
jaxgpt sample runs/{run} --prompt "..."
```
"""
LOAD_VLLM = """In vLLM (according to its source code; not tested):

```sh
vllm serve {name}
```
"""
LOAD_LLAMACPP = """In llama.cpp, as a GGUF file:

```sh
jaxgpt import {name} runs/{run}
jaxgpt export runs/{run} {run}.gguf --type q8_0
llama-cli -m {run}.gguf
```
"""
LOAD_ADAPTER = """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{name}")
```

```sh
jaxgpt import {name} runs/{run} --init-from runs/base
```
"""


def loading_section(name: str, engines: Sequence[Engine], is_adapter: bool) -> str:
    """Show how to load `name` with transformers (an adapter with PEFT) and jaxgpt, and in other programs among `engines`."""
    parts = ["## How to load it\n", LOAD_ADAPTER if is_adapter else LOAD_MODEL]
    if "vLLM" in engines:
        parts.append(LOAD_VLLM)
    if "llama.cpp" in engines:
        parts.append(LOAD_LLAMACPP)
    _, _, without_owner = name.rpartition("/")
    return "\n".join(parts).format(name=name, run=without_owner)
