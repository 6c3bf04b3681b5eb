"""jaxgpt data report PRESET|RUN|PATH"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxgpt.cli.console import note, progress
from jaxgpt.cli.data_description import SourceDescription, pairs_description, text_description
from jaxgpt.cli.options import NO_SETTINGS, GivenSettings, Json
from jaxgpt.cli.output import print_result
from jaxgpt.cli.settings import named_config, with_settings
from jaxgpt.config import Config, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.files import beside
from jaxgpt.presets import DEFAULT, PRESETS, preset
from jaxgpt.suggestions import did_you_mean

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.data import Data
    from jaxgpt.progress import Progress

LONGEST = 2**22  # tokens per window, enough for any preference pair


def data_report(target: str = "", /, *, json: Json = False, settings: GivenSettings = NO_SETTINGS) -> int:
    """Describe the data of a preset, run or path; a path is read as by `jaxgpt train --data.path PATH`.

    The report lists tokens, documents, duplicates, the overlap between validation
    and training tokens, and baselines. Baselines are the validation losses of a uniform
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
    is_run = _is_run(target)
    config = _report_config(_base(target, settings), settings, is_run)
    from jaxgpt.checkpoint.run import open_run

    name = target or config.data.path or " ".join(config.data.mix)
    run = open_run(Path(target)) if is_run else None
    with progress("tokenizing") as activity:
        data = _open(config, run, settings, activity)
        activity.stage("counting")
        descriptions = [_describe(part, config, activity) for part in data.sources]

    if data.kind == "mixture":
        return _print_mixture(name, _shares(config, data), descriptions, json)
    [description] = descriptions
    return print_result(json, {"name": name, **description.numbers}, description.text())


def _print_mixture(
    name: str, shares: Mapping[str, float], descriptions: Sequence[SourceDescription], json: bool
) -> int:
    """Print the descriptions of the sources of a mixture; `shares`: fractions of the training windows, keyed by path."""
    sources = []
    texts = []
    for (path, share), description in zip(shares.items(), descriptions, strict=True):
        sources.append({"path": path, "share": share, **description.numbers})
        texts.append(description.text(f"{path}, {share:.1%} of the training windows"))
    return print_result(json, {"name": name, "sources": sources}, "\n\n".join(texts))


def _is_run(target: str) -> bool:
    """Return whether a target is a run: it has config.json and tokenizer.json; other directories may have one of the files."""
    has_run_files = all(Path(target, name).is_file() for name in ("config.json", "tokenizer.json"))
    return target not in ("", *PRESETS) and has_run_files


def _base(target: str, settings: Mapping[str, Any]) -> Config:
    """Return the config of a preset or run, or the default config with a path.

    Raises:
        UserError: if the target does not exist, or the data are specified twice or not at all.
    """
    sets_data = bool({"data.path", "data.mix"} & settings.keys())
    if not target:
        if not sets_data:
            raise UserError("missing argument: a preset, a run or the path of the data (see jaxgpt data report --help)")
        return preset(DEFAULT)
    if target in PRESETS or _is_run(target):
        return named_config(target)
    if not Path(target).exists():
        near = did_you_mean(target, [*PRESETS, *beside(target)])
        raise UserError(f"no preset, run, file or directory {target!r}{near}; jaxgpt presets lists the presets")
    if sets_data:
        raise UserError(f"{target} is the path of the data: omit --data.path and --data.mix")
    base = preset(DEFAULT)
    return replace(base, data=replace(base.data, path=target))


def _report_config(base: Config, settings: Mapping[str, Any], is_run: bool) -> Config:
    """Return the settings for reading the data of a report: a mixture as at the end of a run, or preference pairs.

    Raises:
        UserError: if a setting is invalid, the data are prompts, or ids have no tokenizer.
    """
    config = with_settings(base, settings)
    config = replace(config, data=config.data.with_last_mixture())
    if config.post.is_rollout:
        raise UserError(
            f"data report does not describe prompts, the data of post.objective {config.post.objective}: pass text, "
            f"conversations or preference pairs"
        )
    config = _for_pairs(config, is_run)
    if config.data.tokenizer == "ids":
        raise UserError("data report needs the tokenizer of the ids: pass --data.tokenizer gpt2 or PATH")
    return config.with_model(vocab_size=0)  # 0: the vocabulary of the tokenizer


def _for_pairs(config: Config, is_run: bool) -> Config:
    """Return the settings for reading preference pairs if the data are pairs, otherwise `config`.

    Unusable pairs are skipped and counted. Without a run or data.window, windows are longer than any pair.
    """
    from jaxgpt.data.preferences import are_preferences
    from jaxgpt.record_files import holds_records

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


def _open(config: Config, run: Run | None, settings: Mapping[str, Any], progress: Progress) -> Data:
    """Open the data of a report, with the tokenizer of the run if the target is a run.

    Prints a note if the settings do not change the data of the run, but the data have changed since its last checkpoint.
    """
    from jaxgpt.checkpoint.data import open_run_data
    from jaxgpt.checkpoint.index import info_of, saved_steps

    tokenizer = run.tokenizer() if run and "data.tokenizer" not in settings else None
    sets_data = any(name.startswith("data.") for name in settings)
    used_by = None if sets_data else run  # the run that has used the data
    info = info_of(used_by, "last") if used_by and saved_steps(used_by.checkpoints) else None
    _, data, change = open_run_data(used_by, info, config, tokenizer, progress)
    if change:
        note(f"{change}; this report and its baselines describe the new data")
    return data


def _describe(data: Data, config: Config, activity: Progress) -> SourceDescription:
    """Describe data that is not a mixture: preference pairs, or text."""
    from jaxgpt.report.describe import describe
    from jaxgpt.report.preferences import describe_preferences

    if config.post.is_preference:
        return pairs_description(describe_preferences(data))
    return text_description(describe(data, activity))


def _shares(config: Config, mixture: Data) -> dict[str, float]:
    """Return the fraction of the training windows from each part of a mixture, keyed by path."""
    weights = config.data.weights(config.data.phases[0])
    total = sum(weights.values())
    return {part.name: weights[part.name] / total for part in mixture.sources}
