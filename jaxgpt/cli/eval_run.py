"""Evaluate a run on its validation split or a different text, for `jaxgpt eval`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from jaxgpt.checkpoint.data import open_run_data
from jaxgpt.checkpoint.index import info_of
from jaxgpt.checkpoint.run import Run, open_run
from jaxgpt.cli.console import note, progress
from jaxgpt.cli.eval_results import EvalResult, Loss, report_divergence, report_loss, report_reward
from jaxgpt.cli.options import Weights
from jaxgpt.cli.output import print_result
from jaxgpt.config import Config, MeshConfig, PostConfig
from jaxgpt.data import Data, Split, with_path
from jaxgpt.data.preferences import are_preferences
from jaxgpt.data.source_kinds import check_sources, check_windows_begin
from jaxgpt.errors import UserError
from jaxgpt.lm import LM, load
from jaxgpt.lm.weights import dequantize, quantize
from jaxgpt.parallel.host import use_cores
from jaxgpt.post.frozen_reference import open_trained_reference
from jaxgpt.post.held_out_divergence import DivergenceResult, HeldOutDivergence
from jaxgpt.post.held_out_reward import HeldOutReward, RewardResult
from jaxgpt.post.start import build_program, named_reward
from jaxgpt.progress import Progress
from jaxgpt.record_files import holds_records
from jaxgpt.trainer.evaluation import evaluate
from jaxgpt.trainer.evaluators import Watch
from jaxgpt.trainer.mean_loss import Evaluation

T = TypeVar("T")


class DataOptions(NamedTuple):
    """The options that change the data of a run for an evaluation.

    Attributes:
        path: path of the data; "": the data of the run.
        bos: the setting data.bos; None: as in training.
        on_error: the setting data.on_error; None: as in training.
    """

    path: str
    bos: Literal["auto", "yes", "no"] | None
    on_error: Literal["fail", "skip"] | None

    def applied_to(self, config: Config) -> Config:
        """Return the settings of a run with these options.

        The objective is next-token for a distilled model, and on a `path` without the data of the run's objective.
        """
        config = with_path(config, self.path)
        if self._needs_next_token(config):
            config = replace(config, post=PostConfig())
        data = config.data
        if self.bos:
            data = replace(data, bos=self.bos)
        if self.on_error:
            data = replace(data, on_error=self.on_error)
        return replace(config, data=data)

    def _needs_next_token(self, config: Config) -> bool:
        """Return whether to evaluate a run with the next-token loss instead of the objective of its training."""
        if config.post.objective == "distill":  # a distilled model is compared with other models by its next-token loss
            return True
        return bool(self.path) and config.post.objective != "next-token" and not _has_examples(self.path, config)


def _has_examples(path: str, config: Config) -> bool:
    """Return whether a path holds the data of an objective: preference pairs or prompts; False for a missing path."""
    if not Path(path).exists() or not holds_records(Path(path)):
        return False
    return config.post.is_rollout or are_preferences(Path(path))


class EvalOptions(NamedTuple):
    """The options of `jaxgpt eval` without tasks.

    Attributes:
        run: run directory.
        checkpoint: best, last or a step.
        data: the options that change the data.
        reward: rewards on the command line; (): the rewards of the run.
        weights: type of the rounded weights; float32: not rounded.
    """

    run: str
    checkpoint: str
    data: DataOptions
    reward: tuple[str, ...]
    weights: Weights

    @property
    def path(self) -> Path:
        """Path of the run directory."""
        return Path(self.run)

    def check(self, config: Config) -> None:
        """Raise `UserError` if an option has no effect on the evaluation of a run with these settings."""
        post = config.post
        if self.weights != "float32" and post.is_rollout:
            what = "rewards" if post.has_rewards else "answers of a student"
            raise UserError(
                f"--weights {self.weights} has no effect on {what}, which need the weights of training: omit it"
            )
        if self.reward and not post.has_rewards:
            what = self.data.path or f"{self.run}, a run with post.objective {post.objective}"
            raise UserError(
                f"--post.reward has no effect on {what}: omit it, or evaluate a run with rewards on prompts"
            )
        if self.data.bos in ("yes", "no"):
            check_windows_begin(config, f"--data.bos {self.data.bos}")


def evaluate_run(options: EvalOptions, json: bool) -> int:
    """Evaluate a run, and print the result."""
    use_cores(MeshConfig())
    with progress("loading") as activity:
        lm, data = _open(options, activity)
        activity.stage("evaluating")
        result = _evaluate(lm, data, options, activity)
    return print_result(json, {"run": options.run, **result.numbers}, result.facts)


def _open(options: EvalOptions, activity: Progress) -> tuple[LM, Data]:
    """Open a model and the data to evaluate it on; the model has the objective of the evaluation.

    Raises:
        UserError: if an option has no effect, or the data of the run have changed.
    """
    # Check the options before the weights are read, which may take minutes.
    config = options.data.applied_to(open_run(options.path).config())
    options.check(config)
    if options.data.path:
        check_sources(config)
    lm = load(options.run, options.checkpoint)

    activity.stage("tokenizing")
    config = options.data.applied_to(lm.config)
    if options.data.path:
        _, data, change = open_run_data(None, None, config, lm.tokenizer, activity)
    else:
        run = Run(options.path)
        _, data, change = open_run_data(run, info_of(run, options.checkpoint), config, lm.tokenizer, activity)
    if change:
        fix = "restore it, or evaluate on a different text with --data.path"
        raise UserError(f"{change}, so a loss on it would not be a validation loss; {fix}")
    post = replace(config.post, reward=options.reward) if options.reward else config.post
    return lm._replace(config=replace(lm.config, post=post)), data


def _evaluate(lm: LM, data: Data, options: EvalOptions, activity: Progress) -> EvalResult:
    """Compute the reward, the divergence from the teacher, or the loss, depending on the objective of the model."""
    post = lm.config.post
    run = Run(options.path)
    if post.has_rewards:
        return report_reward(lm, data, _reward(lm, data, options.reward, activity))
    if post.is_rollout:
        return report_divergence(lm, data, _divergence(lm, run, data, activity))
    loss = _loss(lm, run, data.val, options.weights, activity)
    part = _evaluated_part(data, options.data.path, lm.config)
    return report_loss({"model": lm.source, "text": f"{data.source} ({part})"}, loss, lm.config, data)


def _evaluated_part(data: Data, path: str, config: Config) -> str:
    """Return the name of the evaluated part of the data; `path`: as in `DataOptions`."""
    if data.held_out:
        return "validation split"
    if path:
        return "all"
    return "training pairs" if config.post.is_preference else "training text"


def _reward(lm: LM, data: Data, named: tuple[str, ...], activity: Progress) -> RewardResult:
    """Compute the reward of greedily decoded answers to prompts; `named` are the rewards on the command line."""
    evaluator = HeldOutReward(named_reward(lm.config.post, named, note))
    program = build_program(_on_this_machine(lm.config))
    return _finished(evaluator(program, program.put_params(lm.params), Watch(data=data, progress=activity)))


def _divergence(lm: LM, run: Run, data: Data, activity: Progress) -> DivergenceResult:
    """Compute the divergence of a model from its teacher, the reference of its run, on sampled answers to prompts."""
    teacher = open_trained_reference(run)
    assert teacher is not None
    program = build_program(_on_this_machine(lm.config), teacher.source.config.model, frozen=teacher.argument)
    evaluator = HeldOutDivergence()
    return _finished(evaluator(program, program.put_params(lm.params), Watch(data=data, progress=activity)))


def _loss(lm: LM, run: Run, split: Split, weights: Weights, activity: Progress) -> Loss:
    """Compute the loss of the weights as trained, and of the weights rounded to the type `weights`."""
    # The evaluation may have the objective next-token instead of the objective of the training.
    reference = open_trained_reference(run) if lm.config.post.has_reference else None
    program = build_program(_on_this_machine(lm.config), frozen=reference.argument if reference else None)

    def loss(params: Any) -> Evaluation:
        return _finished(evaluate(program, program.put_params(params), split, Watch(progress=activity)))

    as_trained = loss(lm.params)
    if weights == "float32":
        return Loss(weights, as_trained, rounded=as_trained)
    activity.stage(f"evaluating {weights}")
    rounded = dequantize(quantize(lm.params, lm.config.model, weights))
    return Loss(weights, as_trained, rounded=loss(rounded))


def _finished(result: T | None) -> T:
    """Return the result of an evaluation, which cannot be None here: nothing interrupts it."""
    assert result is not None
    return result


def _on_this_machine(config: Config) -> Config:
    """Replace the mesh, attention kernel and rematerialization of a run, which may need hardware that this machine lacks."""
    train = replace(config.train, attention="auto", remat="none")
    return replace(config, mesh=MeshConfig(), train=train)
