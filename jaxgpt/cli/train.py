"""jaxgpt train [PRESET|RUN] [--out DIR] [--resume] [--section.field value ...]"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.parse import Command, Settings, command_line, named_config, note, path_word, with_settings
from jaxgpt.config import Config, DistributedConfig, UserError, flat, from_json, to_json
from jaxgpt.files import read_bytes
from jaxgpt.presets import DEFAULT, PRESETS

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run

COMMAND = Command(
    "train",
    "[PRESET|RUN]",
    "Train a model with the settings of a preset (default: python-char), a run or a file; or resume a run.",
    [
        "jaxgpt train shakespeare --train.steps 1000 --out runs/long",
        "jaxgpt train shakespeare --data.path my.txt --optim.learning-rate 1e-3",
        "jaxgpt train finetune --init-from runs/gpt2 --data.path my.txt --lora.rank 8  # train LoRA adapters",
        "jaxgpt train gpt2 --data.mix web=0.7 code=0.3 --data.documents pack  # two folders of token files",
        "jaxgpt train runs/long --out runs/again --train.seed 2  # same settings, another seed",
        "jaxgpt train --resume --out runs/long --train.steps 2000",
    ],
)


@dataclass(frozen=True)
class Args(Settings):
    out: str = ""  # run directory; empty: a new one under runs/
    resume: bool = False  # resume the run in --out; with a PRESET, start a new run if there is none
    overwrite: bool = False  # delete the run in --out and start a new one there
    config: str = ""  # read the settings from this file, such as the config.json of a run, instead of a preset
    init_from: str = ""  # initialize the weights from this run or RUN/checkpoints/STEP; empty: at random
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def run(args: Sequence[str]) -> int:
    [target], given = COMMAND.read(Args, args)
    if given.get("data.path") == "":
        raise UserError("--data.path is empty: name a file or folder, or leave it out to use the preset's dataset")
    file, repeats = given.get("config", ""), target not in ("", *PRESETS)
    if target and file:
        raise UserError(f"{target} and --config {file} both give settings: leave out one of them")
    base = _config_file(file) if file else named_config(target or DEFAULT)
    if repeats and not given.get("out"):
        if not given.get("resume"):
            raise UserError(f"{target} is a run: repeat its settings with --out NEW, or resume it with --resume")
        given["out"] = target
    old = _existing(given.get("out", ""), base.preset if target or file else "") if given.get("resume") else None
    init_from = given.get("init_from", base.init_from) if old is None else ""
    source = _begun(base, init_from) if init_from else base
    if old is not None:
        base = replace(base, preset=old.preset, init_from=old.init_from) if repeats or file else old
    else:
        if "init_from" in given:
            # The model is that of the weights; a run or file decides what may differ from it (`check_start`).
            free = {"dropout": base.model.dropout, "block_size": base.model.block_size} if repeats or file else {}
            base = replace(source, init_from=init_from).with_model(**free)
        base = _repeated(Path(target), base) if repeats else base
    parsed, config = with_settings(Args, given, base)
    if config.lora.rank and not config.init_from:
        raise UserError("--lora.rank needs the weights of a run to adapt: add --init-from RUN")
    if parsed.resume and parsed.overwrite:
        raise UserError("--resume and --overwrite cannot be combined: resume the run, or replace it")
    if old is not None:
        config = _checked_resume(old, config, parsed)
    elif init_from:
        config = _checked_start(source, config, init_from)
    elif base.preset == "finetune":
        raise UserError("finetune needs the weights of a run: add --init-from RUN")
    else:
        config = _with_prepared_tokenizer(config, "data.tokenizer" in given)
    if parsed.overwrite:
        _check_overwrite(Path(parsed.out), config.init_from)

    from jaxgpt.parallel.join import joined

    with joined(parsed.distributed):
        return _train(config, parsed, old)


def _train(config: Config, args: Args, old: Config | None) -> int:
    """Train a new run, or resume the run in `args.out` with settings `old`."""
    from jaxgpt.parallel import keep_memory, use_cores
    from jaxgpt.parallel.join import on_peer_failure
    from jaxgpt.parallel.processes import assert_same_on_all, count, leader, on_leader

    use_cores(config.mesh, count(), config.model)
    keep_memory(config)
    from jaxgpt.checkpoint.base import check_base, locate_base
    from jaxgpt.checkpoint.run import Run, new_run, open_run, parse_checkpoint, write_settings
    from jaxgpt.checkpoint.store import kept_checkpoint_message
    from jaxgpt.checkpoint.versions import versions
    from jaxgpt.cli.background import plot_losses
    from jaxgpt.cli.progress import progress
    from jaxgpt.cli.report import Report
    from jaxgpt.data import open_data
    from jaxgpt.files import sole_writer, write_atomically
    from jaxgpt.trainer.init_from import cropped
    from jaxgpt.trainer.loop import fit
    from jaxgpt.trainer.program import build
    from jaxgpt.trainer.resume import ResumePoint, check_data, check_paths, resume_point

    flags = {f"--{name}": getattr(args, name) for name in ("out", "resume", "overwrite", "init_from")}
    flags["whether there is a run to resume"] = old is not None
    assert_same_on_all(lambda: config, lambda config: versions() | flags | flat(config))
    run = Run(Path(args.out))
    if args.resume and old is None and leader():
        note(f"no run at {run.path} yet: starting a new one")

    def find() -> ResumePoint:
        stack.enter_context(sole_writer(run.path))
        return resume_point(run, old or config, config, note)

    def begin() -> str:
        if old is None:
            return str(stack.enter_context(new_run(args.out, config, data.tokenizer, args.overwrite)).path)
        if last is not None:
            check_data(run, last, data, (old.data.path, old.data.mix) != (config.data.path, config.data.mix))
        write_settings(run, config, data.tokenizer)
        return args.out

    with ExitStack() as stack:
        with progress("checking the checkpoints", leader()):
            last, finished = on_leader(find) if old is not None else (None, False)
        tokenizer, params, base, where = None, None, None, Path(config.init_from)
        if config.lora.rank and (args.init_from or not finished):
            from jaxgpt.lm.model import load_base

            where = where if old is None else locate_base(run, config)
            read = lambda: load_base(where, config.model)  # noqa: E731
            base, tokenizer = assert_same_on_all(read, lambda read: {"the weights of --init-from": read[0].checksum})
            if last is not None:
                check_base(run, config, last, base.checksum, where)
        if finished:
            if base is not None and old is not None:  # the base has been moved
                moved = replace(old, init_from=config.init_from)
                on_leader(lambda: write_atomically(run.path / "config.json", to_json(moved)))
                if leader():
                    note(f"the base of {run.path} is now {moved.init_from}")
            if leader() and not run.plot.exists():
                plot_losses(run, f"{config.preset}: {run.path}")
            return 0
        if config.init_from and last is None and base is None:
            from jaxgpt.lm import load

            _, params, tokenizer, _ = load(*parse_checkpoint(config.init_from))
        if old is not None and (last is not None or (run.path / "tokenizer.json").exists()):
            tokenizer = run.tokenizer()
        if old is not None:
            check_paths(config.data)
        with progress("tokenizing", leader()) as activity:
            data = assert_same_on_all(lambda: open_data(config, tokenizer, activity), lambda data: data.facts())
        data.check(config)
        if not config.model.vocab_size:
            config = config.with_model(vocab_size=data.tokenizer.vocab_size)
        program = build(config, base=base and base._replace(params=cropped(base.params, config.model)))
        base = None  # the program has a copy on its devices
        directory = Run(Path(on_leader(begin)))
        assert_same_on_all(lambda: open_run(directory.path), lambda _: {})  # every process must see the directory
        on_peer_failure(lambda: f"{kept_checkpoint_message(directory.checkpoints)}; resume with: {_resume(directory)}")
        start = None if params is None else program.init(cropped(params, config.model))
        with Report(program, data, directory, last or 0) as reporter:
            outcome = fit(program, data, directory, reporter, last, start)
    if outcome.interrupted:
        reporter.note(f"stopped and saved at step {int(outcome.state.step)}; resume with: {_resume(directory)}")
        return 0
    reporter.finished(outcome)
    return 0


def _check_overwrite(out: Path, init_from: str) -> None:
    """Check that `--overwrite` deletes neither the weights to start from nor the bases of their adapters."""
    from jaxgpt.checkpoint.base import locate_base
    from jaxgpt.checkpoint.run import Run, parse_checkpoint

    weights, what = Path(init_from), "the weights to start from"
    while init_from:
        if out.resolve() in weights.resolve().parents:
            raise UserError(f"--out {out} --overwrite would delete {what}: choose another --out")
        run = Run(parse_checkpoint(str(weights))[0])
        config = run.config()
        init_from, what = config.init_from if config.lora.rank else "", f"the base of {run.path}"
        weights = locate_base(run, config) if init_from else weights


def _resume(run: Run) -> str:
    return command_line("train", "--resume", "--out", path_word(run.path))


def _config_file(name: str) -> Config:
    """Read settings from a file."""
    path = Path(name)
    if path.is_dir():
        raise UserError(f"--config {name} is a directory; to repeat a run: jaxgpt train {name} --out NEW")
    config = from_json(read_bytes(path), name)
    # The name of the preset becomes the name of a directory, and a file may hold any string.
    return replace(config, preset=config.preset if config.preset in PRESETS else "custom")


def _repeated(run: Path, config: Config) -> Config:
    """Reset a vocabulary size that came from the tokenizer, because the repeated run may use other data."""
    from jaxgpt.checkpoint.run import open_run

    weights = f"the weights of {config.init_from}" if config.init_from else "random weights"
    note(f"using the settings of {run}, starting from {weights}")
    derived = config.model.vocab_size == open_run(run).tokenizer().vocab_size
    return config.with_model(vocab_size=0) if derived and not config.init_from else config


def _existing(out: str, name: str) -> Config | None:
    """Read the settings of the run to resume; None if there is no run yet and a preset is given to start one."""
    from jaxgpt.checkpoint.run import Run

    if not out:
        raise UserError("--resume needs a run directory: jaxgpt train --resume --out DIR")
    run = Run(Path(out))
    if not run.exists():
        if name:
            return None
        raise UserError(f"no run at {out} (no config.json); to start one: jaxgpt train PRESET --out {out}")
    config = run.config()
    if name and name != config.preset:
        raise UserError(
            f"{out} is a run of preset {config.preset!r}, not {name!r}: leave out the preset, or choose another --out"
        )
    return config


def _checked_resume(old: Config, config: Config, args: Args) -> Config:
    """Check the settings that change when a run is resumed."""
    from jaxgpt.checkpoint.run import parse_checkpoint
    from jaxgpt.trainer.resume import resumed_config

    if old.lora.rank and args.init_from:  # the base has been moved; its checksum says whether it is the same
        return _checked_start(old, resumed_config(old, config), args.init_from)
    source = Path(old.init_from), parse_checkpoint(old.init_from)[0]
    if args.init_from and (not old.init_from or Path(args.init_from) not in source):
        started = f"started from {old.init_from}" if old.init_from else "did not start from another run's weights"
        raise UserError(f"--init-from {args.init_from}: {args.out} {started}; leave out the flag, or start a new run")
    return resumed_config(old, config)


def _with_prepared_tokenizer(config: Config, named: bool) -> Config:
    """Record the tokenizer of a folder written by `jaxgpt data prepare`, unless the user has named one.

    Raises:
        UserError: the user has named one that would have to be built from a text.
    """
    from jaxgpt.data.shards import find_prepared

    data = config.data
    prepared = find_prepared(Path(data.path)) if data.path else None
    if prepared is None:
        return config
    name = prepared.index["tokenizer"]["name"]
    if named and data.tokenizer in ("char", "word", "bpe") and data.tokenizer != name:
        raise UserError(
            f"{data.path} was prepared with the tokenizer {name}, not {data.tokenizer}: leave out --data.tokenizer"
        )
    return config if named else replace(config, data=replace(data, tokenizer=str(prepared.tokenizer_path)))


def _begun(base: Config, init_from: str) -> Config:
    """Replace the model and tokenizer of a preset by those of the run that provides the initial weights."""
    from jaxgpt.checkpoint.run import open_run, parse_checkpoint

    path, _ = parse_checkpoint(init_from)
    model = open_run(path).config().model
    return replace(base, model=model, data=replace(base.data, tokenizer=str(path / "tokenizer.json")))


def _checked_start(base: Config, config: Config, init_from: str) -> Config:
    """Check that a run can start from the weights of another run, and record the checkpoint."""
    from jaxgpt.checkpoint.run import Run, parse_checkpoint
    from jaxgpt.checkpoint.store import resolve_step
    from jaxgpt.trainer.init_from import check_start

    check_start(base.model, config.model)
    if Path(config.data.tokenizer).absolute() != Path(base.data.tokenizer).absolute():
        raise UserError(
            f"--data.tokenizer {config.data.tokenizer} cannot be used with --init-from: the weights need the tokenizer "
            f"of {init_from}; leave out --data.tokenizer"
        )
    path, which = parse_checkpoint(init_from)
    checkpoints = Run(path).checkpoints
    checkpoint = checkpoints / str(resolve_step(checkpoints, which))
    if not config.lora.rank:
        return replace(config, init_from=str(checkpoint))
    # Adapters are useless without their base, so its path must be valid in every directory.
    data = replace(config.data, tokenizer=str(Path(config.data.tokenizer).absolute()))
    return replace(config, init_from=str(checkpoint.absolute()), data=data)
