"""jaxgpt prove-resume [PRESET] [--steps 20] [--cut 7] [--json]"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxgpt.cli.parse import Command, Settings, print_json
from jaxgpt.config import UserError, from_json
from jaxgpt.presets import DEFAULT

COMMAND = Command(
    "prove-resume",
    "[PRESET|RUN]",
    "Train once without interruption, and once interrupted and resumed in a new process. Compare the final states, the next\n"
    "batch and the metrics bit for bit. The exit code is 1 if they differ.",
    [
        "jaxgpt prove-resume",
        "jaxgpt prove-resume shakespeare --steps 50 --cut 10",
        "jaxgpt prove-resume --model.dropout 0.1 --train.microbatch 16",
    ],
)


@dataclass(frozen=True)
class Args(Settings):
    steps: int = 20  # total number of steps
    cut: int = 7  # steps before the interruption
    json: bool = False  # print one JSON object instead of text


def run(args: Sequence[str]) -> int:
    if args[:1] == ["--leg"]:  # a process started by check_resume
        if len(args) != 2:
            raise UserError("--leg needs one file, and is for the processes that prove-resume starts: leave it out")
        return _leg(Path(args[1]))
    [target], parsed, config = COMMAND.parse_settings(Args, args)
    name = target or DEFAULT
    if not 0 < parsed.cut < parsed.steps:
        raise UserError(f"--cut must be between 1 and --steps - 1 = {parsed.steps - 1}, not {parsed.cut}")
    config = replace(config, train=replace(config.train, steps=parsed.steps))

    from jaxgpt.study.check_resume import check_resume

    hashes = check_resume(config, parsed.cut)
    equal = all(straight == resumed for straight, resumed in hashes.values())
    if parsed.json:
        rows = {name: {"straight": a, "resumed": b, "equal": a == b} for name, (a, b) in hashes.items()}
        print_json({"preset": name, "steps": parsed.steps, "cut": parsed.cut, "equal": equal, "sha256": rows})
        return 0 if equal else 1
    print(
        f"{parsed.steps} steps of {name}, uninterrupted and as {parsed.cut} + {parsed.steps - parsed.cut} in two processes\n"
    )
    print(f"{'sha256 of':12}  {'uninterrupted':20}  interrupted and resumed")
    for part, (a, b) in hashes.items():
        print(f"{part:12}  {a[:20]}  {b[:20]}  {'equal' if a == b else 'DIFFERENT'}")
    print("\nequal, bit for bit" if equal else "\nthe resumed run differs")
    return 0 if equal else 1


def _leg(job: Path) -> int:
    from jaxgpt.parallel import use_cores

    config = from_json(json.dumps(json.loads(job.read_text())["config"]))
    use_cores(config.mesh, model=config.model)
    from jaxgpt.study.check_resume import leg

    print_json(leg(job))
    return 0
