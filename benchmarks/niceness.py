"""What it is worth that actors give way to the learner where processes outnumber cores.

Trainings with runner.actor_niceness 0 and 10 take turns; the ratio of each pair is what counts.

    python benchmarks/niceness.py
"""

from __future__ import annotations

import argparse

import measure
from train_unirl import RATE, Row, Window, train_unirl

CONFIGS = (("impala", "@pong"), ("appo", "@appo-pong"))
ENV = "ALE/Pong-v5"
GIVING_WAY = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--no-write", action="store_true", help="leave RESULTS.md as it is")
    flags = parser.parse_args()
    measure.exit_on_terminate()
    window = Window(flags.seconds, warm_up_seconds=5.0)
    rows = []
    for recipe, config in CONFIGS:
        found: dict[int, list[Row]] = {0: [], GIVING_WAY: []}
        for i in range(flags.rounds):
            # Each comes first in every other round: a machine that gets slower favours nobody.
            for niceness in sorted(found, reverse=bool(i % 2)):
                arguments = [recipe, config, "--runner.actor-niceness", str(niceness)]
                found[niceness].append(train_unirl(ENV, arguments, window))
        rates = [f"{measure.median(each, RATE):,.0f}" for each in found.values()]
        ratios = measure.ratios(found[GIVING_WAY], found[0], RATE)
        rows.append(
            [f"{recipe} {config}", *rates, ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))]
        )
    columns = ["env steps/s", "niceness 0", f"niceness {GIVING_WAY}", "ratio of each pair"]
    text = measure.table(columns, rows)
    print(text)
    if not flags.no_write:
        measure.write_block("niceness", text)


if __name__ == "__main__":
    main()
