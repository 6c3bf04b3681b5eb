"""Settings of the objective: the next token, a teacher's distribution, preference pairs, or rewards of generated answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from jaxgpt.reward_words import answer_fields, reward_weights, weight_errors
from jaxgpt.settings import MAX_TOKENS, MAX_VOCAB, Section, setting

WITH_REFERENCE = ("dpo", "robust", "ipo")  # preference objectives with a frozen reference
PREFERENCES = (*WITH_REFERENCE, "simpo", "orpo")  # objectives on preference pairs
REWARDS = ("grpo", "dr-grpo", "dapo", "gspo", "rloo")  # objectives with rewards of generated answers
DISTILLATION = ("distill", "on-policy-distill")  # objectives with a frozen teacher
ROLLOUTS = (*REWARDS, "on-policy-distill")  # objectives on answers that the trained model generates
# Objectives that use each setting of `post`.
USED_BY = {
    "divergence": DISTILLATION,
    "jsd_beta": DISTILLATION,
    "top_k": DISTILLATION,
    "beta": PREFERENCES,
    "label_smoothing": ("dpo", "robust"),
    "normalize": ("dpo", "robust"),
    "margin": ("simpo",),
    "sft": (*WITH_REFERENCE, "simpo"),
    "reference": (*WITH_REFERENCE, *REWARDS, *DISTILLATION),
    "reference_log_p": WITH_REFERENCE,
    "reward": REWARDS,
    "reward_seconds": REWARDS,
    "group": REWARDS,
    "max_new_tokens": ROLLOUTS,
    "overlong_tokens": REWARDS,
    "mask_truncated": REWARDS,
    "rollout_epochs": ROLLOUTS,
    "clip_low": REWARDS,
    "clip_high": REWARDS,
    "kl": REWARDS,
    "kl_estimator": REWARDS,
}


@dataclass(frozen=True, kw_only=True)
class PostConfig(Section):
    """Objective of training: the next token, a teacher's distribution, preference pairs, or rewards of generated answers."""

    prefix = "post"

    objective: Literal[
        "next-token",
        "distill",
        "on-policy-distill",
        "dpo",
        "robust",
        "ipo",
        "simpo",
        "orpo",
        "grpo",
        "dr-grpo",
        "dapo",
        "gspo",
        "rloo",
    ] = setting(
        "next-token",
        "next-token: language modeling; distill: distribution of a teacher on the data; on-policy-distill: on answers of the "
        "student to prompts; dpo to orpo: pairs; grpo to rloo: rewards",
    )
    divergence: Literal["forward", "reverse", "jsd"] = setting(
        "forward",
        "distillation: forward: KL(teacher || student); reverse: KL(student || teacher); jsd: Jensen-Shannon, see jsd_beta",
    )
    jsd_beta: float = setting(
        0.5, "distillation, jsd: weight of the teacher in the mixture of both models (GKD)", above=0.0, below=1.0
    )
    top_k: int = setting(
        0,
        "distillation: compare the k most probable tokens of the teacher, and all others as one; 0: all tokens",
        0,
        MAX_VOCAB,
    )
    beta: float = setting(
        0.1,
        "dpo, robust, ipo: strength of the KL constraint; simpo: factor of the margin; orpo: weight of the odds ratio",
        above=0.0,
        high=1e3,
    )
    label_smoothing: float = setting(0.0, "dpo, robust: assumed fraction of swapped pairs", 0.0, below=0.5)
    normalize: bool = setting(False, "dpo, robust: divide log probabilities by the lengths of the answers")
    margin: float = setting(0.0, "simpo: target margin between the rewards of the answers", 0.0, 1e3)
    sft: float = setting(0.0, "dpo, robust, ipo, simpo: weight of the chosen answer's cross entropy", 0.0, 1e3)
    reference: str = setting(
        "",
        "run or RUN/checkpoints/STEP of the frozen reference; empty: the weights of --init-from; distillation: the teacher",
        private=True,
    )
    reference_log_p: Literal["auto", "once", "every-step"] = setting(
        "auto",
        "dpo, robust, ipo: once: compute log probabilities of the reference before training; every-step: compute them in each "
        "step; auto: every-step with adapters, otherwise once, which keeps no copy of the reference in memory",
    )
    reward: tuple[str, ...] = setting(
        (),
        "rewards: exact[:FIELD], number[:FIELD], regex:PATTERN, json, or FILE.py:FUNCTION, your own code, which is run; "
        "several rewards are added: NAME=WEIGHT for each",
        private=True,
    )
    reward_seconds: float = setting(
        60.0, "rewards: time limit of one call of the reward, in seconds", above=0.0, high=1e6
    )
    group: int = setting(8, "rewards: answers to each prompt of a rollout", 2, 2**16)
    max_new_tokens: int = setting(64, "rollouts: maximum number of tokens of an answer", 1, MAX_TOKENS)
    overlong_tokens: int = setting(
        0, "rewards: tokens before max_new_tokens over which a penalty grows from 0 to 1 (DAPO); 0: off", 0, MAX_TOKENS
    )
    mask_truncated: bool = setting(False, "rewards: no loss on answers that do not end within max_new_tokens (DAPO)")
    rollout_epochs: int = setting(1, "rollouts: passes over the answers of a rollout", 1, 2**16)
    clip_low: float = setting(0.2, "rewards: lower clipping range of the probability ratio", 0.0, high=1.0)
    clip_high: float = setting(0.2, "rewards: upper clipping range of the probability ratio; DAPO uses 0.28", 0.0, 1e3)
    kl: float = setting(0.0, "rewards: weight of the divergence from the reference; 0: no reference", 0.0, 1e3)
    kl_estimator: Literal["k1", "k2", "k3"] = setting("k3", "rewards: estimator of the divergence")

    def check(self) -> Iterator[str]:
        if self.has_rewards and not self.reward:
            yield f"post.objective {self.objective} needs a reward: add --post.reward exact, number, json or FILE.py:FUNCTION"
        yield from weight_errors(self.reward)
        if self.is_distillation and not self.reference:
            yield f"post.objective {self.objective} needs a teacher: add --post.reference RUN"
        if self.jsd_beta != PostConfig.jsd_beta and self.is_distillation and self.divergence != "jsd":
            yield "post.jsd_beta has no effect without post.divergence jsd: add it, or omit post.jsd_beta"
        if self.overlong_tokens > self.max_new_tokens:
            yield (
                f"post.overlong_tokens {self.overlong_tokens} exceeds post.max_new_tokens {self.max_new_tokens}: lower it, or "
                f"raise --post.max-new-tokens"
            )
        if self.has_rewards and self.reference and not self.kl:
            yield "post.reference has no effect without post.kl: add --post.kl 0.01, or omit it"
        for name, objectives in USED_BY.items():
            is_changed = getattr(self, name) != getattr(PostConfig, name)
            if is_changed and self.objective not in objectives:
                fix = f"add --post.objective {objectives[0]}, or omit --post.{name.replace('_', '-')}"
                yield f"post.{name} has no effect on post.objective {self.objective}: {fix}"

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weight of each reward, keyed by its name."""
        return reward_weights(self.reward)

    @property
    def answer_fields(self) -> dict[str, str]:
        """The name of the field with the expected answer, keyed by the built-in reward that reads it."""
        return answer_fields(self.reward_weights)

    @property
    def is_preference(self) -> bool:
        """Whether the data are preference pairs."""
        return self.objective in PREFERENCES

    @property
    def is_rollout(self) -> bool:
        """Whether the data are prompts, and the trained model generates the answers."""
        return self.objective in ROLLOUTS

    @property
    def has_rewards(self) -> bool:
        """Whether the trained model learns from rewards of its answers."""
        return self.objective in REWARDS

    @property
    def is_distillation(self) -> bool:
        """Whether the trained model learns from the distribution of a frozen teacher."""
        return self.objective in DISTILLATION

    @property
    def answers_per_prompt(self) -> int:
        """Number of answers to each prompt of a rollout."""
        return self.group if self.has_rewards else 1

    @property
    def has_reference(self) -> bool:
        """Whether the objective compares the trained weights with a frozen reference."""
        return self.objective in (*DISTILLATION, *WITH_REFERENCE) or (self.has_rewards and self.kl > 0)
