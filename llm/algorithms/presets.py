"""Others' conventions by name, so that a result can be told from a convention.

Each preset says in `source` which file of which project it follows, as that stood in 2026, with the
project's default settings for that algorithm where the name says no more. Length of completions,
learning rate, filters of groups and number of updates per batch are no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

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

# trl/trainer/grpo_trainer.py and grpo_config.py: scale_rewards group with 1e-4, loss_type dapo,
# beta 0, vllm_importance_sampling_mode sequence_mask with clip_max 3.0. No clamp on log-ratios.
_TRL = Algorithm(
    scale="std",
    epsilon=1e-4,
    log_ratio_clamp=math.inf,
    kl_clamp=math.inf,
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


def _named(presets: dict[str, Preset]) -> Mapping[str, Preset]:
    return MappingProxyType(
        {
            name: replace(preset, algorithm=replace(preset.algorithm, preset=name))
            for name, preset in presets.items()
        }
    )


PRESETS: Mapping[str, Preset] = _named(
    {
        "unirl:grpo": Preset(_UNIRL, "this project", "the default"),
        "unirl:vtrace": Preset(
            replace(
                _UNIRL, advantage="vtrace", objective="reinforce", correction="none", dual_clip=0.0
            ),
            "this project",
            "IMPALA's kernel on tokens, the mean of the others as value",
        ),
        "unirl:vtrace-critic": Preset(
            replace(
                _UNIRL,
                advantage="vtrace",
                vtrace_value="critic",
                objective="reinforce",
                correction="none",
                dual_clip=0.0,
                bootstrap=True,
            ),
            "this project",
            "IMPALA's kernel on tokens, with a critic",
        ),
        "verl:grpo": Preset(_VERL, "verl/trainer/ppo/core_algos.py"),
        # recipe/dapo: clip-higher, a buffer of 4096 of 20480 tokens. The penalty of its reward
        # manager (verl/experimental/reward_loop/reward_manager/dapo.py) is not capped.
        "verl:dapo": Preset(
            replace(_VERL, clip_high=0.28, overlong_share=0.2, overlong_capped=False),
            "verl/trainer/ppo/core_algos.py, reward_manager/dapo.py",
            "filter groups of equal rewards as well",
        ),
        # compute_policy_loss_gspo forces seq-mean-token-mean and has no dual clip; the bounds are
        # those of its example scripts, for the shared default of 0.2 never binds here.
        "verl:gspo": Preset(
            replace(
                _VERL,
                objective="gspo",
                clip_low=3e-4,
                clip_high=4e-4,
                dual_clip=0.0,
                log_ratio_clamp=10.0,
                aggregation="seq-mean-token-mean",
            ),
            "verl/trainer/ppo/core_algos.py",
        ),
        # compute_policy_loss_cispo shares PPO's clip_ratio of 0.2.
        "verl:cispo": Preset(
            replace(_VERL, objective="cispo", dual_clip=0.0),
            "verl/trainer/ppo/core_algos.py",
            "weights in [0.8, 1.2], not the paper's",
        ),
        "verl:sapo": Preset(
            replace(_VERL, objective="sapo", dual_clip=0.0, aggregation="seq-mean-token-mean"),
            "verl/trainer/ppo/core_algos.py",
        ),
        "verl:rloo": Preset(
            replace(_VERL, baseline="leave_one_out", scale="none"),
            "verl/trainer/ppo/core_algos.py",
        ),
        "verl:reinforce++": Preset(
            replace(_VERL_WHITE, baseline="none"), "verl/trainer/ppo/core_algos.py"
        ),
        "verl:reinforce++-baseline": Preset(_VERL_WHITE, "verl/trainer/ppo/core_algos.py"),
        "verl:ppo": Preset(
            replace(_VERL_WHITE, advantage="gae", value_coef=1.0, value_clip=0.5),
            "verl/trainer/ppo/core_algos.py",
        ),
        "trl:grpo": Preset(
            replace(_TRL, aggregation="seq-mean-token-mean"),
            "trl/trainer/grpo_trainer.py",
            'loss_type "grpo"',
        ),
        "trl:dapo": Preset(
            _TRL,
            "trl/trainer/grpo_trainer.py",
            'loss_type "dapo", which is GRPOConfig\'s default with all the rest',
        ),
        "trl:dr_grpo": Preset(
            replace(_TRL, scale="none", aggregation="seq-mean-token-sum-norm"),
            "trl/trainer/grpo_trainer.py",
            'loss_type "dr_grpo", scale_rewards "none"',
        ),
        # epsilon_high is the bound itself there, and has no floor; its pages set 5.
        "trl:cispo": Preset(
            replace(_TRL, objective="cispo", clip_low=1.0, clip_high=4.0),
            "trl/trainer/grpo_trainer.py",
            'loss_type "cispo", epsilon_high 5',
        ),
        "trl:sapo": Preset(
            replace(_TRL, objective="sapo", aggregation="seq-mean-token-mean"),
            "trl/trainer/grpo_trainer.py",
        ),
        "openrlhf:ppo": Preset(
            replace(_OPENRLHF_WHITE, advantage="gae", value_coef=1.0, value_clip=0.5),
            "openrlhf/trainer/ppo_utils/experience_maker.py",
        ),
        "openrlhf:reinforce++": Preset(
            replace(_OPENRLHF_WHITE, baseline="none"),
            "openrlhf/trainer/ppo_utils/experience_maker.py",
        ),
        "openrlhf:reinforce++-baseline": Preset(
            replace(_OPENRLHF_WHITE, baseline="mean"),
            "openrlhf/trainer/ppo_utils/experience_maker.py",
        ),
        "openrlhf:rloo": Preset(
            replace(_OPENRLHF, baseline="leave_one_out"),
            "openrlhf/trainer/ppo_utils/experience_maker.py",
        ),
        "openrlhf:grpo": Preset(
            replace(_OPENRLHF, scale="std"),
            "openrlhf/trainer/ppo_utils/experience_maker.py",
            "its group_norm",
        ),
        "openrlhf:dr_grpo": Preset(
            _OPENRLHF,
            "openrlhf/trainer/ppo_utils/experience_maker.py",
            "only the deviation is left out; the mean stays over tokens",
        ),
        # models/loss.py with is_correction_enable: its TIS has a floor that raises small weights.
        "openrlhf:tis": Preset(
            replace(
                _OPENRLHF_WHITE,
                baseline="none",
                correction="tis",
                correction_low=0.5,
                correction_high=5.0,
            ),
            "openrlhf/models/loss.py",
        ),
        # nemo_rl/algorithms/utils.py: calculate_baseline_and_std_per_prompt, calculate_kl;
        # advantage_estimator.py; examples/configs/grpo_math_1B.yaml.
        "nemo:grpo": Preset(
            Algorithm(
                baseline="leave_one_out",
                scale="leave_one_out_std",
                epsilon=1e-6,
                log_ratio_clamp=math.inf,
                kl_coef=0.01,
                kl="k3",
                kl_gradient="score",
            ),
            "nemo_rl/algorithms/utils.py",
        ),
        "slime:grpo": Preset(_SLIME, "slime/utils/ppo_utils.py"),
        # compute_gspo_kl: the completion's mean, gradient through it: that of the token form.
        "slime:gspo": Preset(
            replace(_SLIME, objective="gspo", clip_low=3e-4, clip_high=4e-4),
            "slime/utils/ppo_utils.py",
            "the bounds are its examples'",
        ),
        # areal/utils/functional/functional.py, areal/trainer/ppo/actor.py;
        # examples/math/gsm8k_grpo.yaml, for the default without rejection corrects nothing. Its
        # scaling of rewards, 10 (r - 0.5), belongs to the task.
        "areal:decoupled": Preset(
            Algorithm(
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
            "areal/utils/functional/functional.py",
            "with the rejection that its GSM8K example sets",
        ),
        # skyrl/backends/skyrl_train/utils/ppo_utils.py, skyrl/train/config/config.py.
        "skyrl:grpo": Preset(
            Algorithm(
                scale="std",
                epsilon=1e-6,
                singleton="keep",
                kl_coef=0.001,
                kl="k3",
                kl_clamp=10.0,
            ),
            "skyrl/backends/skyrl_train/utils/ppo_utils.py",
        ),
        # src/prime_rl/trainer/rl/loss.py: default_loss_fn; orchestrator/algo/grpo.py. Its penalty
        # is 1e-3 d^2, which is 2e-3 k2, against the engine.
        "prime-rl:default": Preset(
            Algorithm(
                objective="dppo",
                ratio="behaviour",
                log_ratio_clamp=math.inf,
                kl_coef=0.002,
                kl="k2",
                kl_against="behaviour",
                kl_clamp=math.inf,
            ),
            "src/prime_rl/trainer/rl/loss.py",
        ),
        # roll/pipeline/rlvr/actor_worker.py, roll/utils/functionals.py (reward_norm, agg_loss),
        # roll/configs/base_config.py.
        "roll:grpo": Preset(
            Algorithm(
                scale="std",
                epsilon=1e-6,
                log_ratio_clamp=math.inf,
                aggregation="seq-mean-token-mean",
            ),
            "roll/pipeline/rlvr/actor_worker.py",
        ),
    }
)
"""Presets by name."""
