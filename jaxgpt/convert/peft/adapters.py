"""Import a PEFT adapter as a run, and export the adapters of a run for PEFT."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxgpt.checkpoint.index import weights_at
from jaxgpt.checkpoint.info import About
from jaxgpt.checkpoint.new_path import check_new_run
from jaxgpt.checkpoint.new_run import complete_run
from jaxgpt.checkpoint.paths import parse_checkpoint
from jaxgpt.checkpoint.placement import Place
from jaxgpt.checkpoint.saver import save_params
from jaxgpt.checkpoint.source import open_source
from jaxgpt.config import OF_CHATS
from jaxgpt.convert.card.card import CardSubject, export_command, model_card
from jaxgpt.convert.card.original import CARD
from jaxgpt.convert.drafts import new_directory
from jaxgpt.convert.export_model import Exported
from jaxgpt.convert.import_model import Imported, imported_config
from jaxgpt.convert.peft.read_adapter import read_adapter
from jaxgpt.convert.peft.tokenizer import adapter_tokenizer
from jaxgpt.convert.peft.write_adapter import write_adapter
from jaxgpt.convert.probes import check_change, largest_change, probe_logits
from jaxgpt.counts import parameter_count
from jaxgpt.lm.model import load_adapters
from jaxgpt.model.lora import merge


def import_adapter(source: Path, target: Path, init_from: str) -> Imported:
    """Write a new run with the adapters of a PEFT directory, on the base `init_from`.

    The base is a run or RUN/checkpoints/STEP. The tokenizer and chat template of the adapter are used if they fit the base,
    otherwise the base's; the note of the result lists what was ignored. The new run is created atomically. Raises the errors
    of `read_adapter`, and `UserError` if `target` exists or the base does not exist.
    """
    check_new_run(target)
    where = str(weights_at(init_from).absolute())
    base_run, step = parse_checkpoint(where)
    base = open_source(base_run, step)
    model = base.config.model
    lora, adapters = read_adapter(source, model)
    tokenizer, note = adapter_tokenizer(source, base.run.tokenizer(), model.vocab_size)

    # The run inherits the settings of conversations from the base.
    config = imported_config(target, model, init_from=where, lora=lora)
    of_chats = {name: getattr(base.config.data, name) for name in OF_CHATS}
    config = replace(config, data=replace(config.data, **of_chats))

    frozen = base.read_frozen(Place())
    with complete_run(target, config, tokenizer) as run:
        about: About = {"config": asdict(config), "base": frozen.checksum}
        save_params(run.checkpoints, jax.tree.map(jnp.asarray, adapters), about)
    return Imported("lora", parameter_count(adapters), note=note)


def export_adapter(
    run: str | Path, target: Path, checkpoint: str = "best", base: str = "", license: str = "", repo: str = ""
) -> Exported:
    """Write the adapters of a run as a directory for PEFT's `from_pretrained`, without their base.

    Arguments and errors are as in `export_model`; also raises `UserError` if the run has no adapters. `base` is the
    Hub name or the directory of the base model, recorded for PEFT; empty: `init_from`, the path of the base's checkpoint.
    """
    with new_directory(target) as directory:
        info = open_source(run, checkpoint).info
        trained = load_adapters(run, str(info.step))
        config = trained.config
        model = config.model
        write_adapter(directory, config, trained.params, base)

        command = export_command(run, target, {"checkpoint": checkpoint, "base": base, "license": license})
        if not base:  # `--base` implies `--adapter`
            command += " --adapter"
        subject = CardSubject(
            run=Path(run),
            info=info,
            config=config,
            name=repo or target.name,
            command=command,
            base=base,
            is_adapter=True,
            license=license,
        )
        (directory / CARD).write_text(model_card(subject), "utf-8")

        lora, reread = read_adapter(directory, model)
        before = probe_logits(model, merge(trained.base, trained.params, config.lora.alpha))
        after = probe_logits(model, merge(trained.base, reread, lora.alpha))
        check_change(before, after)
    return Exported("lora", parameter_count(trained.params), largest_change(before, after))
