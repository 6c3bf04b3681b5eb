"""Write trl_values.json: losses, gradients and metrics of TRL, for `test_trl.py`.

Runs in an environment with torch, transformers and trl (1.16.0): `python tests/post/trl_values.py`. The weights are sines of
their indices, so that the tests need no file of weights. `python tests/post/trl_values.py truncated` keeps the other values.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, GRPOConfig
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

LETTERS = "abcdefghijklmnop .+=0123456789"
PAIRS = [
    {"prompt": "do ", "chosen": "a good deed", "rejected": "no"},
    {"prompt": "a ", "chosen": "b", "rejected": "knife on a bamboo link"},
    {"prompt": "1+2=", "chosen": "3", "rejected": "4"},
    {"prompt": "a long decade of ", "chosen": "gold", "rejected": "a big lamp"},
]
DPO: dict[str, dict[str, Any]] = {
    "dpo": {"loss_type": ["sigmoid"], "beta": 0.1},
    "robust": {"loss_type": ["robust"], "beta": 0.3, "label_smoothing": 0.2},
    "ipo": {"loss_type": ["ipo"], "beta": 0.1},
    "normalized": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "sft": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.1},
}
GROUP = 4  # answers to each prompt of the rollouts
LONGEST = 6  # maximum number of tokens of an answer
OVERLONG = 3  # tokens before the maximum with a penalty
EOS = 1
REWARDS = [1.0, 0.0, 0.5, 0.25, 0.0, 0.0, 1.0, 0.0]
GRPO: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo", "beta": 0.0},
    "kl": {"loss_type": "grpo", "beta": 0.05},
    "dr_grpo": {"loss_type": "dr_grpo", "beta": 0.0},
    "dapo": {"loss_type": "dapo", "beta": 0.02, "epsilon_high": 0.28},
    "gspo": {
        "loss_type": "grpo",
        "beta": 0.0,
        "importance_sampling_level": "sequence",
        "epsilon_low": 3e-2,
        "epsilon_high": 4e-2,
    },
}


def sines(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Return fixed weights: 0.3 sin of an index, and gains near 1."""
    values = np.sin(np.arange(np.prod(shape)) * 1.7 + seed, dtype=np.float64)
    return (1 + 0.1 * values if len(shape) == 1 else 0.5 * values).astype(np.float32).reshape(shape)


def projections(array: np.ndarray) -> list[float]:
    """Return the norm of an array, and its products with two fixed arrays."""
    flat = array.astype(np.float64).reshape(-1)
    index = np.arange(len(flat))
    return [float(np.linalg.norm(flat)), float(flat @ np.sin(index)), float(flat @ np.cos(0.7 * index))]


def make(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            parameter.copy_(torch.from_numpy(sines(tuple(parameter.shape), seed + number)))
    return model


def tokenizer_json() -> str:
    vocab = {"<pad>": 0, "<eos>": 1} | {c: i + 2 for i, c in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.decoder = decoders.Fuse()
    text: str = tokenizer.to_str()
    return text


def tokenizer_of() -> PreTrainedTokenizerFast:
    library = Tokenizer.from_str(tokenizer_json())
    return PreTrainedTokenizerFast(tokenizer_object=library, eos_token="<eos>", pad_token="<pad>")


def gradients(model: LlamaForCausalLM) -> dict[str, list[float]]:
    found = {name: projections(parameter.grad.numpy()) for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def of_pairs(model: LlamaForCausalLM, reference: LlamaForCausalLM) -> dict[str, Any]:
    """Return the values of DPO; TRL's trainer tokenizes and collates the pairs."""
    tokenizer = tokenizer_of()
    dataset = Dataset.from_list(PAIRS)
    values: dict[str, Any] = {"losses": {}}
    for name, options in DPO.items():
        args = DPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=len(PAIRS),
            report_to=[],
            use_cpu=True,
            bf16=False,
            fp16=False,
            gradient_checkpointing=False,
            max_length=32,
            **options,
        )
        trainer = DPOTrainer(model, reference, args, train_dataset=dataset, processing_class=tokenizer)
        inputs = trainer.data_collator([trainer.train_dataset[i] for i in range(len(PAIRS))])
        model.train()
        loss = trainer._compute_loss(model, inputs, return_outputs=False)
        loss.backward()
        metrics = {key: v[-1] for key, v in trainer._metrics["train"].items() if key.startswith(("rewards", "logps"))}
        values["losses"][name] = {
            "options": options,
            "loss": loss.item(),
            "metrics": metrics,
            "gradients": gradients(model),
        }
        values["ids"] = inputs["input_ids"].tolist()
        values["mask"] = inputs["completion_mask"].tolist()
    return values


def of_rollout(model: LlamaForCausalLM, reference: LlamaForCausalLM) -> dict[str, Any]:
    """Return the values of GRPO and RLOO on a rollout of a policy that has moved since."""
    prompts = [[9, 10, 11], [20, 21, 22, 23]]
    lengths = [2, 6, 4, 3, 5, 2, 6, 3]
    group, T = GROUP, LONGEST
    rows = defaultdict(list)
    for row, length in enumerate(lengths):
        prompt = prompts[row // group]
        answer = [2 + (7 * row + 5 * i) % 28 for i in range(length)]
        rows["prompt_ids"].append([0] * (4 - len(prompt)) + prompt)
        rows["prompt_mask"].append([0] * (4 - len(prompt)) + [1] * len(prompt))
        rows["completion_ids"].append(answer + [0] * (T - length))
        rows["completion_mask"].append([1] * length + [0] * (T - length))
    rewards = torch.tensor(REWARDS)
    rollout = {name: torch.tensor(value) for name, value in rows.items()}

    moved, reference_log_p = log_probabilities(model, reference, rollout)

    grouped = rewards.view(-1, group)
    mean = grouped.mean(1).repeat_interleave(group)
    advantages = (rewards - mean) / (grouped.std(1).repeat_interleave(group) + 1e-4)
    leave_one_out = rewards - ((grouped.sum(1, keepdim=True) - grouped) / (group - 1)).view(-1)
    inputs = rollout | {
        "advantages": advantages,
        "old_per_token_logps": moved,
        "ref_per_token_logps": reference_log_p,
        "num_items_in_batch": rollout["completion_mask"].sum(),
    }

    recorded = {name: value.tolist() for name, value in inputs.items()}
    recorded |= {"rewards": rewards.tolist(), "leave_one_out": leave_one_out.tolist(), "group": group}
    return {"losses": policy_losses(model, inputs, leave_one_out), "rollout": recorded}


def of_truncated(model: LlamaForCausalLM, reference: LlamaForCausalLM) -> dict[str, Any]:
    """Return the values of GRPO and RLOO without a loss on truncated answers, with the penalty for long answers.

    TRL's trainer masks the answers, and computes their rewards and advantages.
    """
    prompts = [[9, 10, 11], [20, 21, 22, 23]]
    lengths = [2, 6, 4, 3, 5, 2, 6, 3]
    answers = []
    for row, length in enumerate(lengths):
        answer = [2 + (7 * row + 5 * i) % 28 for i in range(length)]
        if length < LONGEST:
            answer[-1] = EOS
        answers.append(answer)

    def rollout(texts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        return {
            "prompt_ids": [prompts[row // GROUP] for row in range(len(answers))],
            "completion_ids": answers,
            "logprobs": None,
        }

    def reward(completions: list[str], **_: Any) -> list[float]:
        return REWARDS

    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=len(answers),
        num_generations=GROUP,
        max_completion_length=LONGEST,
        mask_truncated_completions=True,
        report_to=[],
        use_cpu=True,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
    )
    trainer = GRPOTrainer(
        model,
        [reward, get_soft_overlong_punishment(LONGEST, OVERLONG)],
        args,
        train_dataset=Dataset.from_list([{"prompt": "do "}] * len(answers)),
        processing_class=tokenizer_of(),
        rollout_func=rollout,
    )
    trainer.model.train()
    inputs = trainer._generate_and_score_completions([{"prompt": "do "} for _ in answers])
    kept = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "num_items_in_batch")
    inputs = {name: inputs[name] for name in kept}
    moved, reference_log_p = log_probabilities(model, reference, inputs)
    inputs |= {"old_per_token_logps": moved, "ref_per_token_logps": reference_log_p}

    penalties = get_soft_overlong_punishment(LONGEST, OVERLONG)(answers)
    rewards = torch.tensor(REWARDS) + torch.tensor(penalties)
    grouped = rewards.view(-1, GROUP)
    leave_one_out = rewards - ((grouped.sum(1, keepdim=True) - grouped) / (GROUP - 1)).view(-1)
    recorded = {name: value.tolist() for name, value in inputs.items()}
    recorded |= {
        "answers": answers,
        "rewards": REWARDS,
        "penalties": penalties,
        "leave_one_out": leave_one_out.tolist(),
    }
    recorded |= {"group": GROUP, "longest": LONGEST, "overlong": OVERLONG}
    return {"losses": policy_losses(model, inputs, leave_one_out), "rollout": recorded}


def per_token(model: LlamaForCausalLM, ids: torch.Tensor, mask: torch.Tensor, keep: int, **_: object) -> Any:
    """Return the log probability and the entropy of each of the last tokens."""
    position = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=position).logits[:, :-1]
    log_p = torch.log_softmax(logits, -1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, ids[:, 1:, None])[..., 0][:, -keep:], entropy[:, -keep:], None


def log_probabilities(
    model: LlamaForCausalLM, reference: LlamaForCausalLM, rollout: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log probabilities of a policy that has moved since the rollout, and of the reference."""
    ids = torch.cat([rollout["prompt_ids"], rollout["completion_ids"]], 1)
    mask = torch.cat([rollout["prompt_mask"], rollout["completion_mask"]], 1)
    B, T = rollout["completion_ids"].shape
    with torch.no_grad():
        now, *_ = per_token(model, ids, mask, T)
        reference_log_p, *_ = per_token(reference, ids, mask, T)
    moved = now + 0.3 * torch.sin(torch.arange(B * T).reshape(-1, T).float())
    return moved, reference_log_p


def policy_losses(
    model: LlamaForCausalLM, inputs: dict[str, torch.Tensor], leave_one_out: torch.Tensor
) -> dict[str, Any]:
    """Return TRL's losses, metrics and gradients of a rollout."""

    def fake(**options: object) -> Any:
        """Return the attributes that TRL's `_compute_loss` reads."""

        def same(x: Any, **_: Any) -> Any:
            return x

        accelerator = SimpleNamespace(
            gather=same, reduce=same, gather_for_metrics=same, num_processes=1, sync_gradients=True
        )
        attributes = {
            "accelerator": accelerator,
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "importance_sampling_level": "token",
            "off_policy_mask_threshold": None,
            "use_vllm": False,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": 8,
            "_entropy_bonus_enabled": False,
            "use_adaptive_entropy": False,
            "_metrics": {"train": defaultdict(list), "eval": defaultdict(list)},
            "args": SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
            "temperature": 1.0,
            "model_kwarg_keys": set(),
            "use_liger_kernel": False,
            "model": model,
            "_get_per_token_logps_and_entropies": per_token,
        }
        trainer = mock.Mock(spec=[])
        for name, value in (attributes | options).items():
            setattr(trainer, name, value)
        return trainer

    losses = {}
    for name, options in GRPO.items():
        trainer = fake(**options)
        model.train()
        loss = GRPOTrainer._compute_loss(trainer, model, inputs)
        loss.backward()
        metrics = {key: value[-1] for key, value in trainer._metrics["train"].items()}
        losses[name] = {"options": options, "loss": loss.item(), "metrics": metrics, "gradients": gradients(model)}
    old = (inputs["old_per_token_logps"] * inputs["completion_mask"]).sum(1)
    loss = RLOOTrainer._compute_loss(fake(), model, inputs | {"advantages": leave_one_out, "old_logps": old})
    loss.backward()
    losses["rloo"] = {"options": {}, "loss": loss.item(), "metrics": {}, "gradients": gradients(model)}
    return losses


def main() -> None:
    model, reference = make(0), make(100)
    path = Path(__file__).with_suffix(".json")
    values: dict[str, Any]
    if "truncated" in sys.argv:
        values = json.loads(path.read_text())
    else:
        values = {
            "trl": trl.__version__,
            "tokenizer": tokenizer_json(),
            "records": PAIRS,
            "pairs": of_pairs(model, reference),
            "rollout": of_rollout(model, reference),
        }
    values["truncated"] = of_truncated(model, reference)
    text = json.dumps(values, separators=(",", ":"))
    path.write_text(text.replace('},"', '},\n"') + "\n")
    for part in ("pairs", "rollout", "truncated"):
        for name, each in values[part]["losses"].items():
            print(part, name, each["loss"], each["metrics"])


if __name__ == "__main__":
    main()
