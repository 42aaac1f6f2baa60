"""`unirl algorithms`: the named algorithms for language models, how two differ."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from unirl import config as configs
from unirl.commands.arguments import parse
from unirl.errors import UniRLError

if TYPE_CHECKING:
    from unirl.llm.algorithms.terms import Algorithm

_COLUMNS = ("name", "advantage", "objective", "aggregation", "correction", "KL")
_USAGE = "unirl algorithms, unirl algorithms NAME, unirl algorithms diff A B"


@dataclass(frozen=True)
class AlgorithmsOptions:
    """Flags of `unirl algorithms`."""

    batch: Path | None = None
    """diff: a batch of tokens as safetensors, as save_batch writes it. None: a small built-in one.
    """
    all: bool = False
    """Without a name: what every algorithm computes, and not only which terms it has."""


def algorithms(arguments: Sequence[str]) -> int:
    """List the presets with their terms, describe one, or compare two on a batch."""
    positional, options = parse(arguments, AlgorithmsOptions)
    if not positional:
        _list_presets(whole=options.all)
        return 0
    if positional[0] != "diff" and len(positional) == 1:
        _describe(_preset(positional[0]), positional[0])
        return 0
    if positional[0] != "diff" or len(positional) != 3:
        near = "" if positional[0] == "diff" else configs.suggestion(positional[0], ["diff"])
        raise UniRLError(
            f'"{" ".join(positional)}" is not understood',
            f"there is {_USAGE}",
            near or "try unirl algorithms diff verl:grpo trl:grpo",
        )
    return _diff(positional[1], positional[2], options.batch)


def _preset(name: str) -> Algorithm:
    from unirl.llm.algorithms.config import AlgorithmConfig
    from unirl.llm.algorithms.resolve import resolve

    return resolve(AlgorithmConfig(preset=name))


def _list_presets(*, whole: bool) -> None:
    """A line each, or all that each computes."""
    from unirl.llm.algorithms.describe import described_terms
    from unirl.llm.algorithms.presets import DEFAULT, PRESETS

    print(f"Algorithms of LLM post-training (algorithm.preset; the default is {DEFAULT})\n")
    if whole:
        for name, preset in PRESETS.items():
            print(name)
            for term, text in described_terms(preset.algorithm).items():
                lines = textwrap.wrap(text, 66, break_on_hyphens=False)
                print(f"  {term:<12}" + f"\n{'':14}".join(lines))
        return
    rows = [_COLUMNS, *(_terms_in_short(name, one.algorithm) for name, one in PRESETS.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        print(" ".join(cells).rstrip())
    print("\none of them:             unirl algorithms NAME")
    print("all that each computes:  unirl algorithms --all")


def _terms_in_short(name: str, a: Algorithm) -> tuple[str, ...]:
    """Its terms by the names that settings have; seq-mean is seq-mean-token-mean."""
    aggregation = a.aggregation.replace("seq-mean-token", "seq")
    correction = "vtrace" if a.advantage == "vtrace" else a.correction
    kl = f"{a.kl_coef:g}" if a.kl_coef else "none"
    return name, a.advantage, a.objective, aggregation, correction, kl


def _describe(algorithm: Algorithm, name: str) -> None:
    from unirl.llm.algorithms.describe import describe
    from unirl.llm.algorithms.presets import PRESETS

    preset = PRESETS[name]
    print(f"{name}: after {preset.source}" + (f" ({preset.note})" if preset.note else ""))
    print(describe(algorithm))
    needs = {
        "groups of at least 2": algorithm.needs_groups,
        "log-probs before the update": algorithm.needs_old_logp,
        "a reference model": algorithm.needs_reference,
        "a critic": algorithm.needs_critic,
    }
    needed = ", ".join(text for text, is_needed in needs.items() if is_needed)
    print(f"{'needs':<12}" + (needed or "nothing but the engine's log-probs"))


def _diff(first: str, second: str, path: Path | None) -> int:
    from dataclasses import replace

    from unirl.bench.table import print_table
    from unirl.llm.algorithms.batch_file import example_batch, load_batch
    from unirl.llm.algorithms.diff import difference, differing_terms
    from unirl.llm.algorithms.effect import plain

    one, two = _preset(first), _preset(second)
    batch = example_batch() if path is None else load_batch(path)
    terms = differing_terms(one, two)
    print("Terms that differ" if terms else "No term differs")
    rows = [(name, *(plain(value) for value in pair)) for name, pair in terms.items()]
    print_table(("term", first, second), rows)
    one, two = (replace(a, norm_tokens=a.norm_tokens or batch.max_tokens) for a in (one, two))
    found = difference(one, two, batch)
    norms = (float(side.gradient.norm()) for side in (found.first, found.second))
    where = "the built-in batch" if path is None else path
    print(f"\nOn {where}: policy and KL, by log-probability")
    rows = [
        ("loss", f"{found.first.loss:.6g}", f"{found.second.loss:.6g}"),
        ("gradient, length", *(f"{norm:.6g}" for norm in norms)),
        ("gradient, ratio of lengths", "1", f"{found.factor:.6g}"),
        ("gradient, cosine", "1", f"{found.cosine:.6f}"),
        ("gradient, largest difference", "0", f"{found.largest:.6g}"),
    ]
    print_table(("", first, second), rows)
    return 0
