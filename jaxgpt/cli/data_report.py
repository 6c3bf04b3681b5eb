"""jaxgpt data report PRESET|RUN|PATH"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxgpt.cli.output import print_json
from jaxgpt.cli.parse import NO_SETTINGS, DataSettings, Json
from jaxgpt.cli.progress import progress
from jaxgpt.cli.settings import named_config, with_settings
from jaxgpt.errors import UserError, did_you_mean
from jaxgpt.files import beside
from jaxgpt.presets import DEFAULT, PRESETS, preset


def data_report(target: str, /, *, json: Json = False, settings: DataSettings = NO_SETTINGS) -> int:
    """Describe the data of a preset or run, or a path as `jaxgpt train --data.path PATH` reads it.

    It has tokens, documents, repetitions, the overlap of validation with training, and baselines to compare a loss with:
    cross entropies of the held-out tokens under a uniform guess and under unigram, bigram and trigram models of the training
    tokens, and the size of the held-out text after gzip primed with the end of the training text.

    jaxgpt data report shakespeare
    jaxgpt data report my.txt --data.tokenizer bpe
    jaxgpt data report FOLDER_OF_BIN_FILES --data.tokenizer gpt2 --json

    Args:
        target: preset, run, or path of the data
    """
    # A directory of text may have a file config.json.
    is_run = target not in PRESETS and all(
        (Path(target) / f"{name}.json").is_file() for name in ("config", "tokenizer")
    )
    if target in PRESETS or is_run:
        base = named_config(target)
    elif Path(target).exists():
        base = preset(DEFAULT)
        base = replace(base, data=replace(base.data, path=target))
        if "data.path" in settings:
            raise UserError(f"two paths: {target} and --data.path {settings['data.path']}; leave one of them out")
        if "data.mix" in settings:
            raise UserError(f"{target} and --data.mix both name the data: leave one of them out")
        if base.data.conversations:
            raise UserError(
                f"conversations need the tokenizer and context length of a model: use jaxgpt data report RUN "
                f"--data.path {target}"
            )
    else:
        near = did_you_mean(target, [*PRESETS, *beside(target)])
        raise UserError(f"no preset, run, file or directory {target!r}{near}; jaxgpt presets lists the presets")
    config = with_settings(base, settings)
    if config.data.tokenizer == "ids":
        raise UserError("data report needs the tokenizer of the ids: --data.tokenizer gpt2 or PATH")

    from jaxgpt.data import open_data
    from jaxgpt.report.report import report_on

    tokenizer = None
    if is_run and "data.tokenizer" not in settings:
        from jaxgpt.checkpoint.run import open_run

        tokenizer = open_run(Path(target)).tokenizer()
    with progress("tokenizing") as activity:
        data = open_data(config.with_model(vocab_size=0), tokenizer, activity)
        activity.stage("counting")
        reports = [report_on(part, activity) for part in data.parts or (data,)]
    weights = [weight for _, weight in config.data.sources]
    shares = [{"path": part.name, "share": w / sum(weights)} for part, w in zip(data.parts, weights, strict=False)]
    if json:
        sources = [share | results for share, results in zip(shares, reports, strict=False)]
        print_json({"name": target} | ({"sources": sources} if sources else reports[0]))
        return 0
    for number, results in enumerate(reports):
        if shares:
            path, share = shares[number].values()
            print("\n" * (number > 0) + f"{'source':<14} {path}, {share:.1%} of the training windows")
        for label, text in _facts(results):
            print(f"{label:<14} {text}")
        print()
        for line in _table(results):
            print(line)
    return 0


def _facts(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    val = results["validation_tokens"]
    held_out = f"{val:,} validation" if val else "no validation"
    size = results["bytes_per_token"]
    yield "data", results["source"]
    ratio = f"; {size:.2f} bytes per token" if size else ""
    yield "tokens", f"{results['train_tokens']:,} training, {held_out}{ratio}"
    yield "vocabulary", f"{results['vocabulary_used']:,} of {results['vocabulary']:,} tokens occur"
    for items in ("documents", "lines"):
        if results[items] is not None:
            yield items, f"{results[items]:,}, {_share(results[f'duplicate_{items}'], results[items])}"
    if results["overlap"] is not None:
        yield "overlap", f"{results['overlap']:.2%} of the validation 13-grams occur in the training tokens"


def _share(repeated: int, total: int) -> str:
    share = f" ({repeated / total:.1%})" if repeated else ""
    return f"{repeated:,} duplicate{'s' * (repeated != 1)}{share}"


def _table(results: dict[str, Any]) -> Iterator[str]:
    baselines = results["baselines"]
    known = baselines["uniform"]["bits_per_byte"] is not None
    split = "validation tokens" if results["validation_tokens"] else "training tokens (nothing is held out)"
    yield f"{'baseline':<18} {'nats per token':>14}" + f" {'bits per byte':>14}" * known
    for name, row in baselines.items():
        label = f"uniform, ln {results['vocabulary']}" if name == "uniform" else name
        yield f"{label:<18} {row['loss']:>14.4f}" + (f" {row['bits_per_byte']:>14.4f}" if known else "")
    sampled = results["counted_tokens"] < results["train_tokens"] - 2
    counted = f"; n-grams are counted in {results['counted_tokens']:,} training tokens" * sampled
    yield f"\nOn {results['evaluated_tokens']:,} {split}{counted}."
    trigram = baselines["trigram"]["loss"]
    yield f"A loss below the trigram's {trigram:.4f} means that the model uses more than the two previous tokens."
