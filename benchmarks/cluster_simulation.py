"""Where one queue server saturates: what its calls cost at 33 to 10 329 slots, and clusters
of up to 10 000 actors simulated around it, on a virtual clock.

    python benchmarks/cluster_simulation.py               # measures, simulates, 8 real actors
    python benchmarks/cluster_simulation.py --most 2048   # the smaller ones, in a minute
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import measure
from waiting_plan import slots_per_second

from unirl.bench import server_costs
from unirl.bench.cluster_shape import ClusterShape
from unirl.bench.server_costs import CallCost, ServerCosts
from unirl.bench.simulation import Simulated, Simulation

CURVE = Path(__file__).resolve().parent / "curves" / "cluster-simulation.png"
MEMBERS = (8, 32, 128, 512, 2_048, 10_000)
CHECK = ClusterShape(
    members=8, members_per_node=8, batch_size=4, max_staleness=2, window=1, unroll_seconds=0.1,
    unroll_spread=0.3, slot_kb=0.0, weights_mb=0.0, lease_seconds=0.0, learner_seconds=0.04,
    learner_ms_per_slot=0.0, updates=100,
)  # fmt: skip
"""Eight real processes that wait: batches of 4 in order of start, the learner nearly busy."""


def shape_of(members: int) -> ClusterShape:
    """The 5 s of an unroll are 20 steps of environments that wait 250 ms, or of slower ones."""
    return ClusterShape(
        members=members,
        members_per_node=16,
        max_staleness=32,
        unroll_seconds=5.0,
        updates=32,
        warm_updates=32,
    )


def simulate(members: Sequence[int], costs: ServerCosts, **changes: float) -> dict[int, Simulated]:
    """Each size; prints how long that took really."""
    found = {}
    for number in members:
        started = time.perf_counter()
        found[number] = Simulation(replace(shape_of(number), **changes), costs).run()
        print(f"{number} actors: {time.perf_counter() - started:.1f} s, {found[number].limit}")
    return found


def draw(
    costs: Mapping[int, Mapping[str, float]],
    now: Mapping[int, Simulated],
    then: Mapping[int, Simulated],
    light: Mapping[int, Simulated],
) -> None:
    """The tables as curves."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for call in ("take", "lease", "commit", "slot", "release", "members"):
        left.loglog(list(costs), [costs[number][call] for number in costs], "o-", label=call)
    left.set_xlabel("slots of the queue")
    left.set_ylabel("core-microseconds of one call")
    left.legend()
    possible = [one.possible_slots_per_second for one in now.values()]
    right.loglog(list(now), possible, "k:", label="what the actors could produce")
    rates = [one.slots_per_second for one in now.values()]
    right.loglog(list(now), rates, "o-", label="simulated")
    rates = [one.slots_per_second for one in then.values()]
    right.loglog(list(then), rates, "s--", label="if no call depended on the slots")
    rates = [one.slots_per_second for one in light.values()]
    right.loglog(list(light), rates, "^-.", label="if weights took no time on the network")
    right.set_xlabel("actors")
    right.set_ylabel("slots per second")
    right.legend()
    figure.tight_layout()
    figure.savefig(CURVE, dpi=100)


def rows_of(found: Mapping[int, Simulated]) -> list[list[str]]:
    return [
        [
            f"{members:,}",
            f"{one.num_slots:,}",
            f"{one.possible_slots_per_second:,.1f}",
            f"{one.slots_per_second:,.1f}",
            *(f"{share:.0%}" for share in one.shares.values()),
            f"{one.staleness_mean:.2f}, {one.staleness_max}",
            one.limit,
        ]
        for members, one in found.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, default=MEMBERS[-1], help="actors of the largest")
    parser.add_argument("--no-check", action="store_true", help="start no real actors")
    parser.add_argument("--only-calls", action="store_true", help="simulate nothing")
    options = parser.parse_args()
    members = [number for number in MEMBERS if number <= options.most]
    sizes = [shape_of(number).queue.num_slots for number in members]
    measured = server_costs.measure(sizes)
    costs = ServerCosts.fit(measured)
    calls = list(measured[sizes[0]])
    parts = [
        "Core-microseconds of one call of the real server, by its number of slots. `take`: a look"
        " that finds one; `slot`: each that a look finds; `release`: of one.",
        measure.table(
            ["slots", *calls],
            [[f"{n:,}", *(f"{one[c]:,.1f}" for c in calls)] for n, one in measured.items()],
        ),
    ]
    measure.write_block("cluster-calls", "\n\n".join(parts))
    print("\n\n".join(parts), flush=True)
    if options.only_calls:
        return
    flat = ServerCosts(*(CallCost(one.fixed_us, 0.0) for one in vars(costs).values()))
    now, large = simulate(members, costs), [number for number in members if number > 128]
    then, light = simulate(large, flat), simulate(large, costs, weights_mb=0.0)
    draw(measured, now, then, light)
    columns = ["actors", "slots", "possible slots/s", "slots/s", *now[members[0]].shares]
    columns += ["staleness mean, max", "limit"]
    parts = [
        f"As lines: {', '.join(f'{n} {c}' for n, c in vars(costs).items())}.",
        "Simulated clusters, 5 s an unroll of 564 KB, with these costs:",
        measure.table(columns, rows_of(now)),
        "The same if no call depended on the number of slots:",
        measure.table(columns, rows_of(then)),
        "With the costs, if weights took no time on the network:",
        measure.table(columns, rows_of(light)),
        f"![cluster simulation](curves/{CURVE.name})",
    ]
    if not options.no_check:
        simulated = Simulation(CHECK, costs).run().slots_per_second
        with tempfile.TemporaryDirectory() as folder:
            real = slots_per_second(replace(CHECK, updates=160), Path(folder) / "run")
        parts.append(
            f"Checked with 8 real actor processes that wait 100 ms an unroll, a learner that waits "
            f"40 ms an update of 4: {real:.1f} slots/s, simulated {simulated:.1f}, "
            f"ratio **{simulated / real:.2f}**."
        )
    body = "\n\n".join(parts)
    print(body)
    measure.write_block("cluster-simulation", body)


if __name__ == "__main__":
    main()
