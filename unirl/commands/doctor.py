"""`unirl doctor`: what of this machine, or of the nodes of a cluster, would hold a run back."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unirl.commands.arguments import choose, parse, recipe_and_files

if TYPE_CHECKING:
    from unirl.doctor.findings import Finding, Needs

_HELD_BACK = 1


@dataclass(frozen=True)
class RayOptions:
    """The cluster that is asked about."""

    address: str | None = None
    """Of its head: all nodes are looked at, and compared. auto: the one that this machine is in."""


@dataclass(frozen=True)
class DoctorOptions:
    """Flags of `unirl doctor`, besides those of a recipe if one is named."""

    json: bool = False
    """Print one JSON object: all that was found, and what it means."""
    runs_dir: Path = Path("runs")
    """Where run folders are, or will be: its disk is looked at."""
    ray: RayOptions = field(default_factory=RayOptions)


def doctor(arguments: Sequence[str]) -> int:
    """Print a line for each subject; 1 where something would hold a run back."""
    recipe, files = recipe_and_files(arguments, DoctorOptions)
    if recipe is None and not files:
        _, options = parse(arguments, DoctorOptions)
        needs = None
    else:
        chosen, options = choose(arguments, DoctorOptions, "doctor")
        plan = chosen.plan()
        needs = _needs_of(plan, chosen.title)
    from unirl.doctor.facts import node_facts
    from unirl.doctor.findings import Finding, Needs, compare

    folder = str(options.runs_dir.absolute())
    if options.ray.address is None:
        facts = node_facts(folder)
        nodes: list[dict[str, Any]] = [{"node": facts["node"], "facts": facts}]
    else:
        from unirl.doctor.ray import facts_of_nodes

        nodes = facts_of_nodes(options.ray.address, folder)
    answered = [one for one in nodes if "facts" in one]
    differences = compare(answered) if len(nodes) > 1 and answered else []
    if options.ray.address is not None and os.environ.get("RAY_AUTH_MODE") != "token":
        hint = "who reaches its ports runs code there: start it with RAY_AUTH_MODE=token"
        differences.append(Finding("token", "the cluster asks for none", False, hint))
    findings = {one["node"]: _findings(one, needs or Needs()) for one in nodes}
    all_found = [*differences, *(each for found in findings.values() for each in found)]
    is_held_back = any(one.is_problem for one in all_found)
    if options.json:
        shown = [
            {**one, "findings": [dataclasses.asdict(each) for each in findings[one["node"]]]}
            for one in nodes
        ]
        lines = [dataclasses.asdict(one) for one in differences]
        print(json.dumps({"ok": not is_held_back, "nodes": shown, "differences": lines}))
    else:
        for node, found in findings.items():
            _print(node, found)
        if differences:
            _print("between nodes", differences)
        number = sum(one.is_problem for one in all_found)
        print(f"{number} thing(s) would hold a run back" if number else "nothing holds a run back")
    return _HELD_BACK if is_held_back else 0


def _findings(node: dict[str, Any], needs: Needs) -> list[Finding]:
    from unirl.doctor.findings import Finding, judge

    if "facts" in node:
        return judge(node["facts"], needs)
    remedy = "the node needs UniRL in the Python that Ray runs there: use one image for all"
    return [Finding("answer", node["error"], True, remedy)]


def _needs_of(plan: Any, title: str) -> Needs:
    from unirl.doctor.findings import Needs

    if plan.runner.is_inline:
        num_processes = 1
    else:
        helpers = [pool.helpers.count for pool in plan.pools if pool.helpers is not None]
        num_processes = 1 + sum(pool.bounds[1] for pool in plan.pools) + sum(helpers)
    on_host = [one for one in plan.learners if one.spec.device == "cpu"]
    slot_bytes = sum(one.queue.num_slots * one.spec.num_bytes for one in on_host)
    return Needs(slot_bytes, num_processes, title)


def _print(title: str, findings: Sequence[Finding]) -> None:
    print(title)
    width = max(len(one.subject) for one in findings)
    for one in findings:
        mark = "!!" if one.is_problem else "  "
        print(f"{mark} {one.subject:<{width}}  {one.found}")
        if one.remedy:
            print(f"   {'':<{width}}  -> {one.remedy}")
