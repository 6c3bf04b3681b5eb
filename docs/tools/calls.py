"""Print call trees with file and line: `python docs/tools/calls.py`. The site shows them in docs/code.md.

A tree is written as indented names; file and line come from the functions themselves. `word = name` is the function `name`,
which the caller calls as `word`. tests/test_calls.py checks that each function uses the names below it.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import jaxgpt

PACKAGE = Path(jaxgpt.__file__).resolve().parents[1]  # parent directory of jaxgpt: the clone, or site-packages

TREES = {
    "tokens to update": """
trainer.loop.train
  trainer.loop.run_loop
    trainer.feed.batches_of
      feed.at = trainer.feed.DataFeed.at
        data.batches.Batches.at
    start.build = trainer.build.build
    program.step = trainer.run_step.RunStep.__call__
      train.step.gradient_sums
        objective = train.loss.next_token_loss
          forward = train.loss.Forward.__call__
            train.loss.split_windows
            call = model.gpt.GPT.hidden_and_sides
              model.gpt.GPT.embed
                wte = model.embedding.Embedding.__call__
              model.gpt.GPT.stack
                model.gpt.GPT.blocks
                  block = model.gpt.Block.__call__
                    model.gpt.Block._sublayer_input
                      model.gpt.Block._norm
                        model.norm.Norm.__call__
                          ops.norms.norm
                    attention = model.attention.Attention.__call__
                      model.attention.Attention._project
                        model.linear.Linear.__call__
                          ops.linear.linear
                      ops.rotary.rotate
                      ops.attention.attend
                        ops.attention.Visible.mask
                    model.gpt.Block.feed_forward
                      mlp = model.mlp.MLP.__call__
                        ops.activations.activate
            call = model.gpt.GPT.head
            train.loss.cross_entropy
              train.loss.log_likelihood
          train.side_outputs.side_sums
      train.step.mean_gradients
      optimizer = train.optimizer.make_optimizer
        train.optimizer._update_rule
          train.schedule.schedule
          train.muon.muon
      train.step.apply_gradients
""",
    "prompt to text": """
lm.generation.generate
  lm.request.read_request
  lm.generation.decode
    lm.engine.start
      lm.buffers.left_pad
      decoding.sampler.prefill
        decoding.sampler.read_prompts
          model.gpt.GPT.prefill
            model.gpt.GPT.stack
            model.cache.grow
    lm.engine.run
      decoding.sampler.decode_steps
        decoding.sampler.decode_step
          decoding.sampler.extend
            model.gpt.GPT.extend
              model.cache.KVCache.reserve
              model.gpt.GPT.stack
                model.gpt.GPT.blocks
                  block = model.gpt.Block.__call__
                    attention = model.attention.Attention.__call__
                      model.cache.KeysValues.write
          decoding.sampling.sample_token
            decoding.sampling.warp
              decoding.sampling.stages
                decoding.filters.keep_top_k
                decoding.filters.keep_top_p
            decoding.sampling.row_uniform
            decoding.filters.inverse_cdf_sample
    lm.engine.new_ids
    lm.text.TextStream.add
""",
}


def function(name: str) -> Any:
    """Return the function or method at a path in jaxgpt, such as `model.gpt.GPT.head`."""
    parts = name.rpartition(" = ")[2].split(".")
    value: Any = importlib.import_module(f"jaxgpt.{parts[0]}.{parts[1]}")
    for part in parts[2:]:
        value = getattr(value, part)
    return inspect.unwrap(value)


def calls(tree: str) -> list[tuple[int, str]]:
    """Return depth and name of each call of a tree."""
    lines = tree.strip().splitlines()
    return [((len(line) - len(line.lstrip())) // 2, line.strip()) for line in lines]


def place(name: str) -> str:
    """Return file and line of a function."""
    code = function(name)
    file = Path(inspect.getsourcefile(code) or "").resolve().relative_to(PACKAGE)
    return f"{file.as_posix()}:{inspect.getsourcelines(code)[1]}"


def shown(name: str) -> str:
    """Return the name without its module."""
    word, equals, path = name.rpartition(" = ")
    return f"{word}{equals}{'.'.join(path.split('.')[2:])}"


def render(title: str) -> str:
    """Return the call tree of a title as a Markdown code block."""
    rows = [(f"{'  ' * depth}{shown(name)}", place(name)) for depth, name in calls(TREES[title])]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["```text", *(f"{name:{width}}{where}" for name, where in rows), "```"])


def insert(page: str) -> str:
    """Replace the comments `<!-- calls: TITLE -->` of a page with their trees."""
    for title in TREES:
        page = page.replace(f"<!-- calls: {title} -->\n", f"{render(title)}\n")
    return page


if __name__ == "__main__":
    for each in TREES:
        print(f"{each}\n\n{render(each)}\n")
