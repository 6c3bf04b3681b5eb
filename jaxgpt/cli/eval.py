"""jaxgpt eval RUN [--data.path FILE]"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxgpt.cli.eval_results import Loss, print_divergence, print_loss, print_reward
from jaxgpt.cli.options import Checkpoint, Count, Json, Weights, check_unused
from jaxgpt.cli.output import note, progress
from jaxgpt.config import Config, MeshConfig, PostConfig
from jaxgpt.errors import UserError
from jaxgpt.progress import Progress

if TYPE_CHECKING:
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.data import Data, Split
    from jaxgpt.lm import LM
    from jaxgpt.post.on_policy import DivergenceResult
    from jaxgpt.post.rollouts import RewardResult
    from jaxgpt.trainer.evaluation import Evaluation


def eval(
    run: str,
    /,
    *,
    path: Annotated[str, Parameter(name="--data.path")] = "",
    bos: Annotated[Literal["auto", "yes", "no"] | None, Parameter(name="--data.bos")] = None,
    on_error: Annotated[Literal["fail", "skip"] | None, Parameter(name="--data.on-error")] = None,
    reward: Annotated[tuple[str, ...], Parameter(name="--post.reward")] = (),
    weights: Annotated[
        Weights, Parameter(help="round the weights to this type and print the change in loss")
    ] = "float32",
    checkpoint: Checkpoint = "best",
    tasks: str = "",
    tasks_path: str = "",
    limit: Count = 0,
    shots: Annotated[int, Parameter(validator=Number(gte=-1))] = -1,
    chat_template: Annotated[bool, Parameter(negative_bool=())] = False,
    json: Json = False,
) -> int:
    """Compute the loss of a run on its validation split or a different text, or evaluate it on tasks.

    Results of tasks are kept in tasks.json of the run; info and model cards show them.

    On preference pairs, a run with post.objective dpo or similar prints the loss of the objective,
    and the fraction of pairs with a higher reward for the chosen answer. On prompts, a run with
    rewards prints the mean reward of its answers, and a run of on-policy-distill prints the
    divergence from its teacher on its answers.

    jaxgpt eval runs/shakespeare
    jaxgpt eval runs/shakespeare --data.path other.txt
    jaxgpt eval runs/shakespeare --weights int8  # the change in loss from int8 weights
    jaxgpt eval runs/smollm2 --tasks hellaswag,arc_easy --limit 200  # needs jaxgpt[eval]

    Args:
        run: run to evaluate
        path: text, tokens, conversations, pairs or prompts; empty: validation data of the run or, without these, its
            training data
        bos: begin each window of a text with the beginning-of-text token; by default, as in training; only for text
        on_error: on unusable conversations, pairs or prompts: fail, or skip and count them; by default, as in training
        tasks: evaluate these tasks of lm-evaluation-harness instead of a text: names or YAML files, separated by commas
        tasks_path: directory with YAML files of further tasks
        limit: samples of each task; 0: all
        shots: examples in each prompt of a task; -1: as the task defines
        chat_template: render the prompts of tasks with the model's chat template
        reward: rewards to compute on prompts; default: the run's rewards; required for your own code, FILE.py:FUNCTION
    """
    of_tasks = {"--tasks-path": tasks_path, "--limit": limit, "--shots": shots >= 0, "--chat-template": chat_template}
    of_text = {"--data.path": path, "--data.bos": bos, "--data.on-error": on_error, "--post.reward": reward}
    if tasks:
        check_unused(of_text, "with --tasks")
        from jaxgpt.cli.eval_tasks import TaskOptions, eval_tasks

        asked = TaskOptions(tasks, tasks_path, limit, shots, chat_template)
        return eval_tasks(run, checkpoint, weights, asked, json)
    check_unused(of_tasks, "without --tasks")
    from jaxgpt.checkpoint.run import Run
    from jaxgpt.parallel.host import use_cores

    use_cores(MeshConfig())
    options = DataOptions(path, bos, on_error)
    with progress("loading") as activity:
        lm, data = _open(run, checkpoint, options, reward, weights, activity)
        activity.stage("evaluating")
        if lm.config.post.has_rewards:
            rewards = _evaluate_reward(lm, data, reward, activity)
        elif lm.config.post.is_rollout:
            divergence = _evaluate_divergence(lm, Run(Path(run)), data, activity)
        else:
            loss = _evaluate(lm, Run(Path(run)), data.val, weights, activity)
    if lm.config.post.has_rewards:
        return print_reward(run, lm, data, rewards, json)
    if lm.config.post.is_rollout:
        return print_divergence(run, lm, data, divergence, json)
    about = {"model": lm.source, "text": f"{data.source} ({_split(data, path, lm.config)})"}
    return print_loss(run, about, loss, lm.config, data, json)


class DataOptions(NamedTuple):
    """The options that change the data of a run for an evaluation.

    Attributes:
        path: path of the data; "": the data of the run.
        bos: the setting data.bos; None: as in training.
        on_error: the setting data.on_error; None: as in training.
    """

    path: str
    bos: str | None
    on_error: str | None

    def of(self, config: Config) -> Config:
        """Return the settings of a run with these options; on a text, the objective is next-token."""
        from jaxgpt.data import with_path

        config = with_path(config, self.path)
        # A distilled model is compared with other models by the next-token loss.
        is_distilled = config.post.objective == "distill"
        if is_distilled or (self.path and config.post.objective != "next-token" and not _fits(config, self.path)):
            config = replace(config, post=PostConfig())
        options = {"bos": self.bos, "on_error": self.on_error}
        given: dict[str, Any] = {name: value for name, value in options.items() if value}
        return replace(config, data=replace(config.data, **given))


def _open(
    run: str, checkpoint: str, options: DataOptions, reward: tuple[str, ...], weights: Weights, activity: Progress
) -> tuple[LM, Data]:
    """Open a model and the data to evaluate it on; the model has the objective of the evaluation.

    Raises:
        UserError: if an option has no effect, or the data of the run have changed.
    """
    from jaxgpt.checkpoint.data import info_of, open_run_data
    from jaxgpt.checkpoint.run import Run, open_run
    from jaxgpt.data.source_settings import check_sources, check_windows_begin
    from jaxgpt.lm import load

    # Check the options before the weights are read, which may take minutes.
    asked = options.of(open_run(Path(run)).config())
    _check_reward(run, asked, options.path, reward, weights)
    if options.bos in ("yes", "no"):
        check_windows_begin(asked, f"--data.bos {options.bos}")
    if options.path:
        check_sources(asked)
    lm = load(run, checkpoint)

    activity.stage("tokenizing")
    config = options.of(lm.config)
    trained = None if options.path else Run(Path(run))
    info = info_of(trained, checkpoint) if trained else None
    _, data, change = open_run_data(trained, info, config, lm.tokenizer, activity)
    if change:
        fix = "restore it, or evaluate on a different text with --data.path"
        raise UserError(f"{change}, so a loss on it would not be a validation loss; {fix}")
    post = replace(config.post, reward=reward) if reward else config.post
    return lm._replace(config=replace(lm.config, post=post)), data


def _split(data: Data, path: str, config: Config) -> str:
    """Return the name of the evaluated part of the data."""
    if data.held_out:
        return "validation split"
    if path:
        return "all"
    return "training pairs" if config.post.is_preference else "training text"


def _check_reward(run: str, config: Config, path: str, reward: tuple[str, ...], weights: Weights) -> None:
    """Raise `UserError` for an option without an effect: `weights` on rollouts, or `reward` without rewards."""
    if config.post.is_rollout:
        if weights != "float32":
            what = "rewards" if config.post.has_rewards else "answers of a student"
            raise UserError(f"--weights {weights} has no effect on {what}, which need the weights of training: omit it")
    if reward and not config.post.has_rewards:
        what = path or f"{run}, a run with post.objective {config.post.objective}"
        raise UserError(f"--post.reward has no effect on {what}: omit it, or evaluate a run with rewards on prompts")


def _fits(config: Config, path: str) -> bool:
    """Return whether a path holds the data of the objective, preference pairs or prompts; false for a missing path."""
    from jaxgpt.data.preferences import are_preferences
    from jaxgpt.directories import holds_records

    if not Path(path).exists() or not holds_records(Path(path)):
        return False
    return config.post.is_rollout or are_preferences(Path(path))


def _evaluate_reward(lm: LM, data: Data, named: tuple[str, ...], activity: Progress) -> RewardResult:
    """Compute the reward of the most probable answers to prompts; `named` are the rewards on the command line."""
    from jaxgpt.post.rollouts import HeldOutReward
    from jaxgpt.post.start import build_program, named_reward
    from jaxgpt.trainer.evaluation import Watch

    evaluator = HeldOutReward(named_reward(lm.config.post, named, note))
    program = build_program(_on_this_machine(lm.config))
    result = evaluator(program, program.put_params(lm.params), Watch(data=data, progress=activity))
    assert result is not None  # None: interrupted, which cannot happen here
    return result


def _evaluate_divergence(lm: LM, run: Run, data: Data, activity: Progress) -> DivergenceResult:
    """Compute the divergence from the teacher of a run, on answers to prompts."""
    from jaxgpt.post.on_policy import HeldOutDivergence
    from jaxgpt.post.start import build_program, reference_source
    from jaxgpt.trainer.evaluation import Watch

    teacher = reference_source(lm.config, run)
    assert teacher is not None
    program = build_program(_on_this_machine(lm.config), teacher.config.model, frozen=teacher.read)
    evaluator = HeldOutDivergence()
    result = evaluator(program, program.put_params(lm.params), Watch(data=data, progress=activity))
    assert result is not None  # None: interrupted, which cannot happen here
    return result


def _on_this_machine(config: Config) -> Config:
    """Replace the mesh, attention kernel and rematerialization of a run, which may need hardware that this machine lacks."""
    train = replace(config.train, attention="auto", remat="none")
    return replace(config, mesh=MeshConfig(), train=train)


def _evaluate(lm: LM, run: Run, split: Split, weights: Weights, activity: Progress) -> Loss:
    """Compute the loss of the weights as trained, and of the weights rounded to the type `weights`."""
    from jaxgpt.lm.weights import dequantize, quantize
    from jaxgpt.post.start import build_program, reference_source
    from jaxgpt.trainer.evaluation import Watch, evaluate

    reference = reference_source(lm.config, run)
    frozen = reference.read if reference else None
    program = build_program(_on_this_machine(lm.config), frozen=frozen)

    def loss(params: Any) -> Evaluation:
        result = evaluate(program, params, split, Watch(progress=activity))
        assert result is not None  # None: interrupted, which cannot happen here
        return result

    as_trained = loss(program.put_params(lm.params))
    if weights == "float32":
        return Loss(weights, as_trained, rounded=as_trained)
    activity.stage(f"evaluating {weights}")
    rounded = dequantize(quantize(lm.params, lm.config.model, weights))
    return Loss(weights, as_trained, rounded=loss(program.put_params(rounded)))
