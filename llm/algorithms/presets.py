"""Others' conventions by name, so that a result and a convention are kept apart.

Each preset says in `source` which file of which project it follows, as that stood in 2026, with the
project's default settings for that algorithm where the name says no more. Length of completions,
learning rate, filters of groups and number of updates per batch are no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from unirl.llm.algorithms.terms import Algorithm

DEFAULT = "unirl:grpo"


@dataclass(frozen=True)
class Preset:
    """An algorithm, where its formulas were read, and what should be known about it."""

    algorithm: Algorithm
    source: str
    note: str = ""


# Why: the mean of the others is the baseline without bias. Dividing by the deviation of the group
# weighs prompts by how even their rewards are; that of the batch only fits the step to the unit of
# the reward. A mean over completions would turn the gradient, one over tokens hardly does. A wide
# upper clip leaves rare tokens room to grow; the dual clip bounds what a token with negative
# advantage can do. The engine never computes exactly what the learner does, and asynchronous
# samples are older still: the token's ratio up to 2 halves the bias of very old samples at bounded
# weights, and is all but exact for the small mismatch of fresh ones (docs/algorithms.md).
_UNIRL = Algorithm(
    baseline="leave_one_out",
    scale="batch_std",
    epsilon=1e-6,
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=3.0,
    correction="tis",
    correction_high=2.0,
)

# verl/trainer/ppo/core_algos.py: compute_grpo_outcome_advantage, compute_policy_loss_vanilla,
# agg_loss; verl/trainer/config/actor/actor.yaml (clip_ratio_c 3.0, loss_agg_mode token-mean).
_VERL = Algorithm(scale="std", epsilon=1e-6, singleton="keep", dual_clip=3.0)
# The same file's masked_whiten: (x - mean) * rsqrt(unbiased variance + 1e-8).
_VERL_WHITE = replace(_VERL, scale="none", whiten="variance", whiten_epsilon=1e-8)

# trl/trainer/grpo_trainer.py and grpo_config.py (1.16): scale_rewards group with 1e-4, loss_type
# dapo, beta 0, vllm_importance_sampling_mode sequence_mask with clip_max 3.0. No clamp on
# log-ratios. For who sets a beta: use_bias_correction_kl is on by default since 1.10.
_TRL = Algorithm(
    scale="std",
    epsilon=1e-4,
    log_ratio_clamp=math.inf,
    kl_clamp=math.inf,
    kl_gradient="old_ratio",
    correction="icepop",
    correction_level="sequence",
    correction_high=3.0,
)

# openrlhf/trainer/ppo_utils/experience_maker.py, openrlhf/models/loss.py, models/utils.py;
# cli/train_ppo_ray.py: k1 with 0.01 in the reward, token_level_loss.
_OPENRLHF = Algorithm(epsilon=1e-9, kl_coef=0.01, kl="k1", kl_in="reward")
# In the same file, over all tokens: rsqrt(max(biased variance, 1e-8)).
_OPENRLHF_WHITE = replace(
    _OPENRLHF, whiten="floor", whiten_epsilon=1e-8, whiten_unbiased=False, singleton="keep"
)

# slime/ray/rollout.py: _post_process_rewards; slime/utils/ppo_utils.py: compute_policy_loss; the
# sum of sample means of slime/backends/megatron_utils/cp_utils.py. All of them off by default:
# TIS, KL, dual clip.
_SLIME = Algorithm(
    scale="std",
    epsilon=1e-6,
    log_ratio_clamp=math.inf,
    aggregation="seq-mean-token-mean",
)


_VERL_FILE = "verl/trainer/ppo/core_algos.py"
_TRL_FILE = "trl/trainer/grpo_trainer.py"
_OPENRLHF_FILE = "openrlhf/trainer/ppo_utils/experience_maker.py"
_SLIME_FILE = "slime/utils/ppo_utils.py"


def _preset(base: Algorithm, source: str, note: str = "", **terms: Any) -> Preset:
    return Preset(replace(base, **terms), source, note)


_PRESETS = {
    "unirl:grpo": _preset(_UNIRL, "this project", "the default"),
    "unirl:vtrace": _preset(
        _UNIRL,
        "this project",
        "IMPALA's kernel on tokens, the mean of the others as value",
        advantage="vtrace",
        objective="reinforce",
        correction="none",
        dual_clip=0.0,
    ),
    "unirl:vtrace-critic": _preset(
        _UNIRL,
        "this project",
        "IMPALA's kernel on tokens, with a critic",
        advantage="vtrace",
        vtrace_value="critic",
        objective="reinforce",
        correction="none",
        dual_clip=0.0,
        bootstrap=True,
    ),
    "verl:grpo": _preset(_VERL, _VERL_FILE),
    # recipe/dapo: clip-higher, a buffer of 4096 of 20480 tokens. The penalty of its reward
    # manager (verl/experimental/reward_loop/reward_manager/dapo.py) is not capped.
    "verl:dapo": _preset(
        _VERL,
        f"{_VERL_FILE}, reward_manager/dapo.py",
        "filter groups of equal rewards as well",
        clip_high=0.28,
        overlong_share=0.2,
        overlong_capped=False,
    ),
    # compute_policy_loss_gspo forces seq-mean-token-mean and has no dual clip; the bounds are
    # those of its example scripts, for the shared default of 0.2 never binds here.
    "verl:gspo": _preset(
        _VERL,
        _VERL_FILE,
        objective="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        dual_clip=0.0,
        log_ratio_clamp=10.0,
        aggregation="seq-mean-token-mean",
    ),
    # compute_policy_loss_cispo shares PPO's clip_ratio of 0.2.
    "verl:cispo": _preset(
        _VERL,
        _VERL_FILE,
        "weights in [0.8, 1.2], not the paper's",
        objective="cispo",
        dual_clip=0.0,
    ),
    "verl:sapo": _preset(
        _VERL, _VERL_FILE, objective="sapo", dual_clip=0.0, aggregation="seq-mean-token-mean"
    ),
    "verl:rloo": _preset(_VERL, _VERL_FILE, baseline="leave_one_out", scale="none"),
    "verl:reinforce++": _preset(_VERL_WHITE, _VERL_FILE, baseline="none"),
    "verl:reinforce++-baseline": _preset(_VERL_WHITE, _VERL_FILE),
    # verl/workers/critic: a model of its own from critic.model.path, which is the actor's by
    # default, with lr 1e-5 (verl/trainer/config/critic); value loss 0.5 max(clipped, unclipped).
    "verl:ppo": _preset(
        _VERL_WHITE,
        _VERL_FILE,
        "the critic is a model of its own",
        advantage="gae",
        critic="model",
        value_coef=1.0,
        value_clip=0.5,
    ),
    "trl:grpo": _preset(_TRL, _TRL_FILE, 'loss_type "grpo"', aggregation="seq-mean-token-mean"),
    "trl:dapo": _preset(
        _TRL, _TRL_FILE, 'loss_type "dapo", which is GRPOConfig\'s default with all the rest'
    ),
    "trl:dr_grpo": _preset(
        _TRL,
        _TRL_FILE,
        'loss_type "dr_grpo", scale_rewards "none"',
        scale="none",
        aggregation="seq-mean-token-sum-norm",
    ),
    # epsilon_high is the bound itself there, and has no floor; its pages set 5.
    "trl:cispo": _preset(
        _TRL,
        _TRL_FILE,
        'loss_type "cispo", epsilon_high 5',
        objective="cispo",
        clip_low=1.0,
        clip_high=4.0,
    ),
    "trl:sapo": _preset(_TRL, _TRL_FILE, objective="sapo", aggregation="seq-mean-token-mean"),
    # cli/train_ppo_ray.py: critic.model_name_or_path, else the reward model's or the actor's;
    # critic learning rate 9e-6.
    "openrlhf:ppo": _preset(
        _OPENRLHF_WHITE,
        _OPENRLHF_FILE,
        "the critic is a model of its own",
        advantage="gae",
        critic="model",
        value_coef=1.0,
        value_clip=0.5,
    ),
    "openrlhf:reinforce++": _preset(_OPENRLHF_WHITE, _OPENRLHF_FILE, baseline="none"),
    "openrlhf:reinforce++-baseline": _preset(_OPENRLHF_WHITE, _OPENRLHF_FILE, baseline="mean"),
    "openrlhf:rloo": _preset(_OPENRLHF, _OPENRLHF_FILE, baseline="leave_one_out"),
    "openrlhf:grpo": _preset(_OPENRLHF, _OPENRLHF_FILE, "its group_norm", scale="std"),
    "openrlhf:dr_grpo": _preset(
        _OPENRLHF,
        _OPENRLHF_FILE,
        "only the deviation is left out; the mean stays over tokens",
    ),
    # models/loss.py with is_correction_enable: its TIS has a floor that raises small weights.
    "openrlhf:tis": _preset(
        _OPENRLHF_WHITE,
        "openrlhf/models/loss.py",
        baseline="none",
        correction="tis",
        correction_low=0.5,
        correction_high=5.0,
    ),
    # nemo_rl/algorithms/utils.py: calculate_baseline_and_std_per_prompt, calculate_kl;
    # advantage_estimator.py; examples/configs/grpo_math_1B.yaml.
    "nemo:grpo": _preset(
        Algorithm(),
        "nemo_rl/algorithms/utils.py",
        baseline="leave_one_out",
        scale="leave_one_out_std",
        epsilon=1e-6,
        log_ratio_clamp=math.inf,
        kl_coef=0.01,
        kl="k3",
        kl_gradient="score",
    ),
    "slime:grpo": _preset(_SLIME, _SLIME_FILE),
    # compute_gspo_kl: the completion's mean, gradient through it: that of the token form.
    "slime:gspo": _preset(
        _SLIME,
        _SLIME_FILE,
        "the bounds are its examples'",
        objective="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
    ),
    # areal/utils/functional/functional.py, areal/trainer/ppo/actor.py;
    # examples/math/gsm8k_grpo.yaml, for the default without rejection corrects nothing. Its
    # scaling of rewards, 10 (r - 0.5), belongs to the task.
    "areal:decoupled": _preset(
        Algorithm(),
        "areal/utils/functional/functional.py",
        "with the rejection that its GSM8K example sets",
        scale="std",
        epsilon=1e-5,
        whiten="std",
        whiten_epsilon=1e-5,
        clip_low=0.4,
        clip_high=0.4,
        log_ratio_clamp=math.inf,
        correction="icepop",
        correction_high=5.0,
    ),
    # skyrl/backends/skyrl_train/utils/ppo_utils.py, skyrl/train/config/config.py.
    "skyrl:grpo": _preset(
        Algorithm(),
        "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        scale="std",
        epsilon=1e-6,
        singleton="keep",
        kl_coef=0.001,
        kl="k3",
        kl_clamp=10.0,
    ),
    # src/prime_rl/trainer/rl/loss.py: default_loss_fn; orchestrator/algo/grpo.py. Its penalty
    # is 1e-3 d^2, which is 2e-3 k2, against the engine.
    "prime-rl:default": _preset(
        Algorithm(),
        "src/prime_rl/trainer/rl/loss.py",
        objective="dppo",
        ratio="behaviour",
        log_ratio_clamp=math.inf,
        kl_coef=0.002,
        kl="k2",
        kl_against="behaviour",
        kl_clamp=math.inf,
    ),
    # roll/pipeline/rlvr/actor_worker.py, roll/utils/functionals.py (reward_norm, agg_loss),
    # roll/configs/base_config.py. The terms of slime.
    "roll:grpo": _preset(_SLIME, "roll/pipeline/rlvr/actor_worker.py"),
}
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        name: replace(preset, algorithm=replace(preset.algorithm, preset=name))
        for name, preset in _PRESETS.items()
    }
)
"""Presets by name."""
