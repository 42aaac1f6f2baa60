"""What is in force in an algorithm, in words."""

from __future__ import annotations

from unirl.llm.algorithms.terms import Algorithm

_CRITIC = {
    "head": "a critic",
    "detached": "a critic on detached states",
    "model": "a critic, a model of its own",
}


def describe(algorithm: Algorithm) -> str:
    """One line per group of terms."""
    return "\n".join(f"{name:<12}{text}" for name, text in described_terms(algorithm).items())


def described_terms(algorithm: Algorithm) -> dict[str, str]:
    return {
        "advantage": _advantage(algorithm),
        "objective": _objective(algorithm),
        "aggregation": _aggregation(algorithm),
        "correction": _correction(algorithm),
        "KL": _kl(algorithm),
        "overlong": _overlong(algorithm),
        **({"cut off": "masked: no loss"} if algorithm.mask_truncated else {}),
    }


def _advantage(a: Algorithm) -> str:
    if a.advantage == "group":
        text = {
            "none": "reward",
            "mean": "reward - group mean",
            "leave_one_out": "reward - mean of the others",
        }[a.baseline]
        text += {
            "none": "",
            "std": f", / (group std + {a.epsilon:g})",
            "std_biased": f", / (biased group std + {a.epsilon:g})",
            "leave_one_out_std": f", / (std of the others + {a.epsilon:g})",
            "batch_std": f", / (batch std + {a.epsilon:g})",
        }[a.scale]
        if a.discount != 1.0:
            text += f", discounted {a.discount:g} per token"
    elif a.advantage == "gae":
        text = f"GAE, discount {a.discount:g}, lambda {a.gae_lambda:g}, with {_CRITIC[a.critic]}"
        text += ", bootstrapped when cut off" if a.bootstrap else ""
    else:
        value = _CRITIC[a.critic] if a.vtrace_value == "critic" else "the mean of the others"
        text = (
            f"V-trace, value: {value}, rho <= {a.rho_clip:g}, c <= {a.c_clip:g}, "
            f"discount {a.discount:g}, lambda {a.gae_lambda:g}"
        )
        text += ", bootstrapped when cut off" if a.bootstraps else ""
    if a.whiten != "none":
        kind = "unbiased" if a.whiten_unbiased else "biased"
        text += f"; whitened over the batch's tokens ({kind}, {a.whiten_epsilon:g})"
    return text


def _objective(a: Algorithm) -> str:
    if a.objective == "reinforce":
        return "REINFORCE: no ratio, no clip"
    against = "the learner before the update" if a.ratio == "old" else "the engine"
    bounds = f"[{1 - a.clip_low:g}, {1 + a.clip_high:g}]"
    text = {
        "ppo": f"PPO, ratio in {bounds}",
        "cispo": f"CISPO, weight in {bounds}",
        "gspo": f"GSPO, ratio of the completion in {bounds}",
        "sapo": f"SAPO, tau {a.tau_positive:g} / {a.tau_negative:g}",
        "dppo": f"DPPO, probability moves by -{a.clip_low:g} .. +{a.clip_high:g}",
    }[a.objective]
    if a.dual_clip:
        text += f", dual clip {a.dual_clip:g}"
    return f"{text}; against {against}"


def _aggregation(a: Algorithm) -> str:
    if a.aggregation != "seq-mean-token-sum-norm":
        return a.aggregation
    constant = str(a.norm_tokens) if a.norm_tokens else "max_tokens"
    return f"{a.aggregation}, / {constant} per completion"


def _correction(a: Algorithm) -> str:
    if a.advantage == "vtrace":
        return "V-trace, in the advantage"
    if a.ratio == "behaviour":
        return "none besides the ratio, which is to the engine"
    if not a.weighs:
        return "none: the engine's log-probs are trusted"
    whose = {
        "token": "the token's ratio",
        "sequence": "the completion's ratio (product)",
        "geometric": "the completion's ratio (geometric mean)",
    }[a.correction_level]
    bounds = f"[{a.correction_low:g}, {a.correction_high:g}]"
    text = {
        "none": "",
        "tis": f"TIS: {whose} clamped to {bounds}",
        "icepop": f"IcePop: {whose}, 0 outside {bounds}",
    }[a.correction]
    if a.sequence_mask != "none":
        mean = "product" if a.sequence_mask == "product" else "geometric mean"
        text += ", " if text else ""
        text += f"completions whose {mean} is outside [{a.mask_low:g}, {a.mask_high:g}]"
        text += " weigh 0"
    return text


def _kl(a: Algorithm) -> str:
    if not a.kl_coef:
        return "none"
    where = "in the reward" if a.kl_in == "reward" else "in the loss"
    other = "reference" if a.kl_against == "reference" else "engine"
    text = f"{a.kl_coef:g} {a.kl} to the {other}, {where}"
    if a.kl_in == "loss" and a.kl_gradient != "direct":
        text += f", gradient {a.kl_gradient}"
    return text


def _overlong(a: Algorithm) -> str:
    if not a.overlong_share:
        return "none"
    capped = "capped" if a.overlong_capped else "not capped"
    return (
        f"up to -{a.overlong_factor:g} over the last {a.overlong_share:.0%} of max_tokens, {capped}"
    )
