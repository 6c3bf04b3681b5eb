"""jaxgpt data report PRESET|RUN|PATH"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.options import NO_SETTINGS, GivenSettings, Json
from jaxgpt.cli.output import aligned, columns, note, print_result, progress
from jaxgpt.cli.settings import named_config, with_settings
from jaxgpt.config import Config, PostConfig
from jaxgpt.errors import UserError, did_you_mean, plural
from jaxgpt.files import beside
from jaxgpt.presets import DEFAULT, PRESETS, preset

LONGEST = 2**22  # tokens per window that hold any preference pair

if TYPE_CHECKING:
    from jaxgpt.data import Data
    from jaxgpt.data.tokenizer import Tokenizer
    from jaxgpt.progress import Progress


def data_report(target: str = "", /, *, json: Json = False, settings: GivenSettings = NO_SETTINGS) -> int:
    """Describe the data of a preset, run or path; a path is read as by `jaxgpt train --data.path PATH`.

    The report lists tokens, documents, duplicates, the overlap between validation
    and training tokens, and baselines. Baselines are the validation loss of a uniform
    distribution and of n-gram models (n up to 3) of the training tokens. gzip is a
    further baseline: the compressed size of the first MiB of validation text.
    If nothing is held out, baselines use the training data instead. If data.mix has
    several mixtures, the report describes the last.

    For preference pairs (chosen, rejected), the report lists lengths, duplicates,
    contradictions, and the fraction of pairs with a longer chosen answer. Pairs that
    cannot be used, such as pairs with equal answers, are counted.

    jaxgpt data report shakespeare
    jaxgpt data report my.txt --data.tokenizer bpe
    jaxgpt data report DIRECTORY_OF_BIN_FILES --data.tokenizer gpt2 --json

    Args:
        target: preset, run, or path of the data; may be omitted with --data.path or --data.mix
    """
    # A run has config.json and tokenizer.json; a directory of text may contain one of these files.
    has_run_files = all(Path(target, name).is_file() for name in ("config.json", "tokenizer.json"))
    is_run = target not in ("", *PRESETS) and has_run_files
    sets_data = bool({"data.path", "data.mix"} & settings.keys())
    if not target:
        if not sets_data:
            raise UserError("missing argument: a preset, a run or the path of the data (see jaxgpt data report --help)")
        base = preset(DEFAULT)
    elif target in PRESETS or is_run:
        base = named_config(target)
    elif sets_data:
        raise UserError(f"{target} is the path of the data: omit --data.path and --data.mix")
    elif Path(target).exists():
        base = preset(DEFAULT)
        base = replace(base, data=replace(base.data, path=target))
    else:
        near = did_you_mean(target, [*PRESETS, *beside(target)])
        raise UserError(f"no preset, run, file or directory {target!r}{near}; jaxgpt presets lists the presets")

    # A mixture is described as it is at the end of a run; preference pairs have their own report.
    config = with_settings(base, settings)
    config = replace(config, data=config.data.last)
    if config.post.is_rollout:
        raise UserError(f"data report does not describe prompts, the data of post.objective {config.post.objective}")
    config = _for_pairs(config, is_run)
    target = target or config.data.path or " ".join(config.data.mix)
    if config.data.tokenizer == "ids":
        raise UserError("data report needs the tokenizer of the ids: pass --data.tokenizer gpt2 or PATH")

    from jaxgpt.report.describe import describe
    from jaxgpt.report.preferences import describe_preferences

    tokenizer = None
    if is_run and "data.tokenizer" not in settings:
        from jaxgpt.checkpoint.run import open_run

        tokenizer = open_run(Path(target)).tokenizer()
    with progress("tokenizing") as activity:
        is_unchanged = is_run and not any(name.startswith("data.") for name in settings)
        data = _open(config.with_model(vocab_size=0), target if is_unchanged else "", tokenizer, activity)
        activity.stage("counting")
        if config.post.is_preference:
            reports = [describe_preferences(part) for part in data.parts or (data,)]
        else:
            reports = [describe(part, activity) for part in data.parts or (data,)]

    if not data.parts:
        [results] = reports
        return print_result(json, {"name": target} | results, _text(results))

    weights = config.data.weights(config.data.phases[0])
    total = sum(weights.values())
    sources = []
    texts = []
    for part, results in zip(data.parts, reports, strict=True):
        share = weights[part.name] / total
        sources.append({"path": part.name, "share": share} | results)
        texts.append(_text(results, f"{part.name}, {share:.1%} of the training windows"))
    return print_result(json, {"name": target, "sources": sources}, "\n\n".join(texts))


def _for_pairs(config: Config, is_run: bool) -> Config:
    """Return the settings to read preference pairs, if the data are such pairs: unusable pairs are counted.

    Without a run or data.window, no pair is longer than a window.
    """
    from jaxgpt.data.preferences import are_preferences
    from jaxgpt.directories import holds_records

    paths = [Path(each.path) for each in config.data.sources if each.path]
    has_pairs = any(path.exists() and holds_records(path) and are_preferences(path) for path in paths)
    if not (has_pairs or config.post.is_preference):
        return config
    if not config.post.is_preference:
        config = replace(config, post=PostConfig(objective="dpo"))
    if not (is_run or config.data.window):
        train = replace(config.train, batch_size=1, eval_batch_size=1, steps_per_call=1)
        config = replace(config, train=train).with_model(block_size=LONGEST)
    return replace(config, data=replace(config.data, on_error="skip"))


def _open(config: Config, target: str, tokenizer: Tokenizer | None, progress: Progress) -> Data:
    """Open the data of a config; print a note if they are the data of a run and have changed since its last checkpoint."""
    from jaxgpt.checkpoint.data import info_of, open_run_data
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.checkpoint.store import saved_steps

    run = Run(Path(target)) if target else None
    info = info_of(run, "last") if run and saved_steps(run.checkpoints) else None
    _, data, change = open_run_data(run, info, config, tokenizer, progress)
    if change:
        note(f"{change}; this report and its baselines describe the new data")
    return data


def _text(results: dict[str, Any], source: str = "") -> str:
    """Format a report; `source`: description of a source of a mixture."""
    first: dict[str, Any] = {"source": source} if source else {}
    if "longer_chosen" in results:
        return aligned(first | _facts_of_pairs(results))
    return f"{aligned(first | _facts(results))}\n\n{_baselines(results)}"


def _facts_of_pairs(results: dict[str, Any]) -> dict[str, str | list[str]]:
    val = results["validation_pairs"]
    held_out = f"{val:,} validation" if val else "no validation"
    shared = results["shared_prompts"]
    lengths = []
    for name, values in results["lengths"].items():
        middle = f"mean {values['mean']:.1f}, median {values['median']:g}"
        lengths.append(f"{name} {middle}, 95% {values['p95']:g}, max {values['max']:,}")
    return {
        "data": results["source"],
        "pairs": f"{results['train_pairs']:,} training, {held_out}, {plural(results['duplicate_pairs'], 'duplicate')}",
        "contradictions": f"{plural(results['contradictions'], 'pair')} with swapped answers in another pair",
        "prompts": f"{results['prompts']:,} different; {plural(shared, 'validation pair')} with a training prompt",
        "tokens": lengths,
        "longer": f"the chosen answer has more tokens in {results['longer_chosen']:.1%} of the pairs",
        "longest": f"{results['longest']:,} tokens: --data.window {results['longest'] - 1} holds all pairs",
    }


def _facts(results: dict[str, Any]) -> dict[str, str]:
    val = results["validation_tokens"]
    held_out = f"{val:,} validation" if val else "no validation"
    size = results["bytes_per_token"]
    ratio = f"; {size:.2f} bytes per token" if size else ""
    overlap = results["overlap"]

    repeated = {"documents": "", "lines": ""}
    for items in repeated:
        total = results[items]
        if total is not None:
            number = results[f"duplicate_{items}"]
            share = f" ({number / total:.1%})" if number else ""
            repeated[items] = f"{total:,}, {plural(number, 'duplicate')}{share}"
    return {
        "data": results["source"],
        "tokens": f"{results['train_tokens']:,} training, {held_out}{ratio}",
        "vocabulary": f"{results['vocabulary_used']:,} of {results['vocabulary']:,} tokens occur",
        **repeated,
        "overlap": "" if overlap is None else f"{overlap:.2%} of the validation 13-grams occur in the training tokens",
    }


def _baselines(results: dict[str, Any]) -> str:
    baselines = results["baselines"]
    rows = [["baseline", "nats per token", "bits per byte"]]
    for name, row in baselines.items():
        label = f"uniform, ln {results['vocabulary']}" if name == "uniform" else name
        bits = row["bits_per_byte"]
        rows.append([label, f"{row['loss']:.4f}", "unknown" if bits is None else f"{bits:.4f}"])
    split = "validation tokens" if results["validation_tokens"] else "training tokens (nothing is held out)"
    basis = f"On {results['evaluated_tokens']:,} {split}"
    counted = results["counted_tokens"]
    if counted < results["train_tokens"] - 2:  # a sample
        basis += f"; n-grams are counted in {counted:,} training tokens"
    return f"{columns(rows)}\n\n{basis}."
