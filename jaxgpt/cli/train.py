"""jaxgpt train [PRESET] [--out DIR] [--resume] [--section.field value ...]"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jaxgpt.cli.parse import Command, Settings, named_config, with_settings
from jaxgpt.config import Config, DistributedConfig, OptimConfig, UserError, flat
from jaxgpt.presets import DEFAULT

if TYPE_CHECKING:
    from jaxgpt.train.run import Run

COMMAND = Command(
    "train",
    "[PRESET]",
    "Train a model, or resume a run. Without a PRESET: python-char.",
    [
        "jaxgpt train shakespeare --train.steps 1000 --out runs/long",
        "jaxgpt train shakespeare --data.path my.txt --optim.learning-rate 1e-3",
        "jaxgpt train --resume --out runs/long --train.steps 2000",
    ],
)


@dataclass(frozen=True)
class Args(Settings):
    out: str = ""  # directory of the run; empty: a new one under runs/
    resume: bool = False  # resume the run in --out from its last checkpoint
    overwrite: bool = False  # delete the run in --out, and start a new one there
    init_from: str = ""  # start from the model, weights and tokenizer of this run; empty: random weights
    distributed: DistributedConfig = field(default_factory=DistributedConfig)


def run(args: Sequence[str]) -> int:
    [name], given = COMMAND.read(Args, args)
    base = named_config(name or DEFAULT)
    if given.get("resume"):
        base = _resumed(given.get("out", ""), name)
    if init_from := given.get("init_from"):
        base = _begun(base, init_from)
    parsed, config = with_settings(Args, given, base)
    if parsed.resume and (config.model, config.data) != (base.model, base.data):
        raise UserError("a resumed run keeps its model and its data: leave out those flags, or start a run of its own")
    if parsed.resume and _moments(config.optim) != _moments(base.optim):
        raise UserError("a resumed run keeps its optimizer: optim.name, and whether there is an optim.ema_decay")
    if parsed.resume and parsed.overwrite:
        raise UserError("--resume goes on with a run, --overwrite replaces it: choose one")
    if base.preset == "finetune" and not (parsed.init_from or parsed.resume):
        raise UserError("finetune goes on from a model that exists: name it with --init-from RUN")
    if parsed.init_from:
        from jaxgpt.train.start import check_start

        check_start(base.model, config.model)
        if parsed.resume:
            raise UserError("--resume goes on with a run's own weights, --init-from begins with another's: choose one")

    from jaxgpt.parallel.join import joined

    with joined(parsed.distributed):
        return _train(config, parsed)


def _train(config: Config, args: Args) -> int:
    from jaxgpt.parallel import keep_memory, use_cores
    from jaxgpt.parallel.join import on_loss
    from jaxgpt.parallel.processes import agree, count, decide, leader

    use_cores(config.mesh, count(), config.model)
    keep_memory(config)
    from jaxgpt.cli.report import Report
    from jaxgpt.data import load_dataset
    from jaxgpt.train.build import build
    from jaxgpt.train.catalog import kept
    from jaxgpt.train.lock import sole_writer
    from jaxgpt.train.loop import fit
    from jaxgpt.train.plot import plot_losses
    from jaxgpt.train.run import Run, check_free, describe, new_run, open_run, remove_run
    from jaxgpt.train.start import cropped
    from jaxgpt.train.versions import versions

    flags = {f"--{name}": getattr(args, name) for name in ("out", "resume", "overwrite", "init_from")}
    agree(lambda: config, lambda config: versions() | flags | flat(config))
    old = open_run(Path(args.out)) if args.resume else None
    tokenizer, params = None, None
    if old is not None:
        tokenizer = old.tokenizer()
    elif args.init_from:
        from jaxgpt.lm import load

        _, params, tokenizer = load(args.init_from)
    data = agree(lambda: load_dataset(config, tokenizer), lambda data: data.facts())
    if not config.model.vocab_size:
        config = config.with_model(vocab_size=data.tokenizer.vocab_size)
    program = build(config)
    directory = old or Run(Path(decide(lambda: str(new_run(args.out, config.preset, args.overwrite).path))))

    def begin() -> None:
        stack.enter_context(sole_writer(directory.path))
        if args.overwrite:
            remove_run(directory.path)
        elif old is None:
            check_free(directory.path)  # nobody has begun in between
        describe(directory, config, data.tokenizer)

    with ExitStack() as stack:
        decide(begin)
        agree(lambda: open_run(directory.path), lambda _: {})  # a folder that every process sees
        on_loss(lambda: f"{kept(directory.checkpoints)}; go on with: {_resume(directory)}")
        start = None if params is None else program.start_from(cropped(params, config.model))
        with Report(program, data, directory) as reporter:
            outcome = fit(program, data, directory, reporter, args.resume, start)
        if leader():
            plot_losses(directory.metrics, directory.plot, f"{config.preset}: {directory.path}")
    if outcome.interrupted:
        reporter.note(f"stopped and saved at step {int(outcome.state.step)}; go on with: {_resume(directory)}")
        return 0
    reporter.finished(outcome)
    return 0


def _resume(run: Run) -> str:
    return f"jaxgpt train --resume --out {run.path}"


def _resumed(out: str, name: str) -> Config:
    from jaxgpt.train.run import open_run

    if not out:
        raise UserError("--resume needs to know the run: jaxgpt train --resume --out DIR")
    config = open_run(Path(out)).config()
    if name and name != config.preset:
        raise UserError(f"{out} is a run of the preset {config.preset!r}, not of {name!r}")
    return config


def _moments(optim: OptimConfig) -> tuple[str, bool]:
    """What of the optimizer's settings decides what is kept in a checkpoint."""
    return optim.name, optim.ema_decay > 0


def _begun(base: Config, init_from: str) -> Config:
    """A preset with the model of a run that exists; its tokenizer is that run's too."""
    from jaxgpt.train.run import open_run

    path = Path(init_from)
    model = open_run(path).config().model
    return replace(base, model=model, data=replace(base.data, tokenizer=str(path / "tokenizer.json")))
