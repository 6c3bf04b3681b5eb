"""Print tables of docs/scaling.md and docs/tpu.md: training steps compiled for absent TPUs.

All rows take about an hour on two cores.

python benchmarks/plan_table.py                        all rows
python benchmarks/plan_table.py --only gpt2-v5e weak   rows with these name prefixes

Needs `pip install -e '.[tpu]'` on Linux, x86-64. Every row is one `jaxgpt plan ... --json`; the commands are also printed.
Finished rows are kept in --results, so an interrupted run resumes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

GPT2 = "gpt2 --train.accumulation 1"
XL = "gpt2-xl --train.accumulation 1 --train.remat dots"
LLAMA = "llama-2-7b --model.block-size 2048"
# Rows that compare estimates with compiled programs, for docs/tpu.md: a few layers compile in minutes.
FEW = "--train.accumulation 1 --topology v5e:2x4"
EIGHT = "llama-3-8b --topology v5p:4x4x4 --model.n-layer 4"
ACCURACY = {
    "GPT-2, 2 layers": f"gpt2 {FEW} --model.n-layer 2 --mesh.fsdp 8 --train.batch-size 64",
    "GPT-2, 4 layers, remat dots": f"gpt2 {FEW} --model.n-layer 4 --mesh.fsdp 8 --train.batch-size 64 --train.remat dots",
    "GPT-2, 4 layers, remat full": f"gpt2 {FEW} --model.n-layer 4 --mesh.fsdp 8 --train.batch-size 64 --train.remat full",
    "GPT-2, 2 layers, windows of 8,192": f"gpt2 {FEW} --model.n-layer 2 --mesh.fsdp 8 --train.batch-size 16 "
    "--model.block-size 8192",
    "GPT-2, 2 layers, tensor 2": f"gpt2 {FEW} --model.n-layer 2 --model.vocab-size 50304 --mesh.fsdp 4 --mesh.tensor 2 "
    "--train.batch-size 32",
    "Llama 3 8B, 4 layers": f"{EIGHT} --mesh.data 2 --mesh.fsdp 32",
    "Llama 3 8B, 4 layers, tensor 4, remat full": f"{EIGHT} --mesh.data 2 --mesh.fsdp 8 --mesh.tensor 4 --train.remat full",
    "Mixtral, 2 layers, expert 8": "mixtral-8x7b --topology v5p:4x4x4 --model.n-layer 2 --mesh.data 1 --mesh.fsdp 8 "
    "--mesh.expert 8 --train.accumulation 1",
}
# Weak scaling, 8 windows of 1,024 tokens per chip: number of chips, their topology, and size of the fsdp axis.
WEAK = {8: ("2x2x2", 8), 64: ("4x4x4", 16), 512: ("8x8x8", 32), 4096: ("16x16x16", 64)}
PLANS = (
    {
        f"weak-{n}": f"{GPT2} --topology v5p:{grid} --mesh.fsdp {fsdp} --train.batch-size {8 * n}"
        for n, (grid, fsdp) in WEAK.items()
    }
    | {
        "gpt2-v5e": f"{GPT2} --topology v5e:2x4 --mesh.fsdp 8 --train.batch-size 64",
        "gpt2-v6e": f"{GPT2} --topology v6e:2x4 --mesh.fsdp 8 --train.batch-size 64",
        "slices": f"{GPT2} --topology v6e:16x16 --slices 4 --mesh.fsdp 8 --train.batch-size 8192",
        "llama-7b-v5p": f"{LLAMA} --topology v5p:4x4x4 --mesh.data 2 --mesh.fsdp 32 --train.batch-size 128",
        "xl-v6e": f"{XL} --topology v6e:4x8 --mesh.fsdp 32 --train.batch-size 128",
        "xl-v5e": f"{XL} --topology v5e:4x8 --mesh.fsdp 32 --train.batch-size 64",
    }
    | ACCURACY
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="prefixes of row names")
    parser.add_argument("--results", default="plans.jsonl", help="file of the results")
    args = parser.parse_args()
    results = Path(args.results)
    done = {row["row"]: row for row in map(json.loads, results.read_text().splitlines())} if results.exists() else {}
    for row, command in PLANS.items():
        if row in done or not row.startswith(tuple(args.only)):
            continue
        print(f"{row}: jaxgpt plan {command}", file=sys.stderr, flush=True)
        process = subprocess.run(
            [sys.executable, "-m", "jaxgpt", "plan", *command.split(), "--json"],
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        if not process.stdout:
            sys.exit(f"{row}: the plan printed no result, exit code {process.returncode}")
        done[row] = {"row": row, **json.loads(process.stdout)}
        with results.open("a") as file:
            file.write(json.dumps(done[row]) + "\n")
    rows = [row for row in PLANS if row in done]
    print(plans([done[row] for row in rows if row not in ACCURACY and not row.startswith("weak")]))
    print(accuracy([done[row] for row in rows if row in ACCURACY]))
    print(weak([done[row] for row in rows if row.startswith("weak")]))
    for row in rows:
        print(f"jaxgpt plan {PLANS[row]}")


def plans(rows: list[dict[str, Any]]) -> str:
    """Return the table of programs as Markdown, one row per program."""
    lines = [
        "| program | topology | mesh (data x fsdp x tensor) | GiB per device: state + temporaries, of available | fits | "
        "TFLOPs | GB sent | step by roofline, ms | MFU by roofline |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        step, mesh = row["train"], row["mesh"]
        state = (step["memory"]["parameters"] + step["memory"]["optimizer"]) / 2**30
        bounds = step["bounds"]
        lines.append(
            f"| `{row['row']}` | {row['topology']} | {mesh['data']} x {mesh['fsdp']} x {mesh['tensor']} | "
            f"{state:.2f} + {step['total'] / 2**30 - state:.2f}, of {step['available'] / 2**30:.2f} | "
            f"{'yes' if step['fits'] else 'no'} | {step['model_flops'] / 1e12:.1f} | {_sent(step) / 1e9:.2f} | "
            f"{bounds['seconds_overlapped'] * 1e3:.0f} to {bounds['seconds_serial'] * 1e3:.0f} | "
            f"{bounds['mfu_overlapped']:.0%} to {bounds['mfu_serial']:.0%} |"
        )
    return "\n".join(lines) + "\n"


def accuracy(rows: list[dict[str, Any]]) -> str:
    """Return the table of estimates and compiled programs as Markdown; rows of more than 10% difference are marked."""
    lines = [
        "| program | topology | mesh | memory: estimate, compiled, GiB | ratio | sent: estimate, compiled, GB | "
        "lower bound of the step, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        guess, step = row["estimate"], row["train"]
        mesh = " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)
        ratio = guess["total"] / step["total"]
        mark = "" if abs(ratio - 1) <= 0.1 else " (!)"
        lines.append(
            f"| {row['row']} | {row['topology']} | {mesh} | {guess['total'] / 2**30:.2f}, {step['total'] / 2**30:.2f} | "
            f"{ratio:.2f}{mark} | {_sent(guess) / 1e9:.2f}, {_sent(step) / 1e9:.2f} | "
            f"{guess['bounds']['seconds_least'] * 1e3:.1f} |"
        )
    return "\n".join(lines) + "\n"


def weak(rows: list[dict[str, Any]]) -> str:
    """Return the table of weak scaling as Markdown: 8 windows per chip, increasing number of chips."""
    lines = [
        "| chips | mesh (data x fsdp) | TFLOPs per chip (model, compiler) | parameters and optimizer per chip, MB | "
        "temporaries per chip, GiB | sent per chip, GB |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        step, mesh = row["train"], row["mesh"]
        state = step["memory"]["parameters"] + step["memory"]["optimizer"]
        lines.append(
            f"| {row['devices']:,} | {mesh['data']} x {mesh['fsdp']} | {step['model_flops'] / 1e12:.2f}, "
            f"{step['compiled_flops'] / 1e12:.2f} | {state / 1e6:.1f} | "
            f"{step['memory']['temporaries'] / 2**30:.2f} | {_sent(step) / 1e9:.3f} |"
        )
    return "\n".join(lines) + "\n"


def _sent(step: dict[str, Any]) -> float:
    return sum(each["sent"] + each["sent_between_slices"] for each in step["traffic"].values())


if __name__ == "__main__":
    main()
