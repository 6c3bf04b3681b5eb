"""jaxgpt eval RUN [--data.path FILE]"""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from jaxgpt.cli.checks import check_unused
from jaxgpt.cli.options import Checkpoint, Count, Json, Weights


def eval(
    run: str,
    /,
    *,
    path: Annotated[str, Parameter(name="--data.path")] = "",
    bos: Annotated[Literal["auto", "yes", "no"] | None, Parameter(name="--data.bos")] = None,
    on_error: Annotated[Literal["fail", "skip"] | None, Parameter(name="--data.on-error")] = None,
    reward: Annotated[tuple[str, ...], Parameter(name="--post.reward")] = (),
    weights: Annotated[
        Weights, Parameter(help="round the weights to this type; on text and pairs, print the change in loss")
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

    Results of tasks are stored in tasks.json in the run directory; info and model cards show them.

    On preference pairs, prints the loss of the objective and the fraction of pairs with a higher
    reward for the chosen answer. On prompts, prints the mean reward of the run's answers or, for
    on-policy-distill, their divergence from the teacher.

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
        limit: number of samples of each task; 0: all
        shots: number of examples in each prompt of a task, unless the task defines 0; -1: as the task defines
        chat_template: render the prompts of tasks with the model's chat template
        reward: rewards to compute on prompts; empty: the run's rewards; required for your own code, FILE.py:FUNCTION
    """
    of_tasks = {"--tasks-path": tasks_path, "--limit": limit, "--shots": shots >= 0, "--chat-template": chat_template}
    of_text = {"--data.path": path, "--data.bos": bos, "--data.on-error": on_error, "--post.reward": reward}
    if tasks:
        check_unused(of_text, "with --tasks")
        from jaxgpt.cli.eval_tasks import TaskOptions, eval_tasks

        task_options = TaskOptions(tasks, tasks_path, limit, shots, chat_template)
        return eval_tasks(run, checkpoint, weights, task_options, json)
    check_unused(of_tasks, "without --tasks")
    from jaxgpt.cli.eval_run import DataOptions, EvalOptions, evaluate_run

    data = DataOptions(path, bos, on_error)
    return evaluate_run(EvalOptions(run, checkpoint, data, reward, weights), json)
