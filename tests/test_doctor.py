"""unirl doctor: what it finds here is true, what would hold a run back is said with its remedy."""

from __future__ import annotations

import copy
import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from unirl import cli
from unirl.doctor.facts import node_facts
from unirl.doctor.findings import Needs, compare, judge

GIB = 2**30


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """This machine's own facts, which are fine, as JSON carries them between nodes."""
    facts = json.loads(json.dumps(node_facts(str(tmp_path_factory.mktemp("runs") / "not" / "yet"))))
    facts["cores"]["quota"] = None  # a container of CI may have one
    facts["memory"] |= {"available": 8 * GIB, "total": 16 * GIB, "shm_free": 4 * GIB}
    facts["limits"] = {name: None for name in facts["limits"]}
    facts["gpu"] |= {"has_device_files": False, "error": None}
    facts["disk"] |= {"free": 50 * GIB, "fsync_ms": 5.0}
    return dict(facts)


def problems(facts: Mapping[str, Any], needs: Needs = Needs()) -> dict[str, str]:  # noqa: B008
    return {one.subject: one.remedy for one in judge(facts, needs) if one.is_problem}


def changed(facts: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(dict(facts))
    *tables, leaf = path.split("/")
    table = found
    for name in tables:
        table = table[name]
    table[leaf] = value
    return found


def test_the_facts_are_this_machines(here: dict[str, Any]) -> None:
    assert here["python"] == platform.python_version()
    assert here["packages"]["torch"] == torch.__version__ and here["packages"]["numpy"]
    assert here["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert here["memory"]["shm_total"] == shutil.disk_usage("/dev/shm").total
    assert len(here["gpu"]["devices"]) == torch.cuda.device_count()
    assert here["cpu_multiplies"][0] == "float32"


def test_a_machine_without_faults_holds_nothing_back(here: dict[str, Any]) -> None:
    assert problems(here) == {}


@pytest.mark.parametrize(
    ("path", "value", "subject", "remedy"),
    [
        ("python", "3.10.2", "python", "3.11 or 3.12"),
        ("packages/torch", "2.9.0+cpu", "torch", "torch>=2.11"),
        ("packages/gymnasium", None, "gymnasium", "pip install gymnasium"),
        ("cores/quota", 0.5, "cores", "taskset -c 0-0"),
        ("memory/available", GIB // 2, "memory", "about 1.0 GiB"),
        ("memory/shm_free", 2**26, "/dev/shm", "--shm-size"),
        ("limits/open_files", 256, "open files", "ulimit -n"),
        ("limits/cgroup_pids", 20, "processes", "--pids-limit"),
        ("gpu/error", "driver too old", "CUDA", "nvidia-smi"),
        ("disk/free", 2**20, "disk", "free some space"),
        ("disk/error", "Permission denied", "disk", "--runs-dir"),
        ("disk/fsync_ms", 900.0, "disk", "local disk"),
    ],
)
def test_what_would_hold_a_run_back_is_a_problem_with_a_remedy(
    here: dict[str, Any], path: str, value: Any, subject: str, remedy: str
) -> None:
    found = problems(changed(changed(here, "packages/ray", "2.60.0"), path, value))
    ((name, said),) = found.items()
    assert name.startswith(subject) and remedy in said


def test_gpus_need_a_build_of_torch_and_a_driver_that_fit(here: dict[str, Any]) -> None:
    gpu = {**here["gpu"], "torch_cuda": "13.0", "driver_cuda": "13.1"}
    gpu["devices"] = [{"name": "G", "memory": 80 * GIB}] * 2
    assert problems({**here, "gpu": gpu}) == {}
    for change in ({"driver_cuda": "12.4"}, {"devices": []}):
        assert list(problems({**here, "gpu": {**gpu, **change}})) == ["CUDA"]
    build = {**gpu, "torch_cuda": None, "devices": [], "has_device_files": True}
    assert "CUDA build" in problems({**here, "gpu": build})["CUDA"]


def test_a_plan_needs_memory_and_files_for_its_slots_and_processes(here: dict[str, Any]) -> None:
    assert "about 21." in problems(here, Needs(20 * GIB, 4, "pong"))["memory"]
    limited = changed(changed(here, "limits/open_files", 1024), "cores/usable", 2)
    assert problems(limited) == {}
    assert list(problems(limited, Needs(0, 100))) == ["memory", "open files"]


def test_nodes_that_differ_are_named(here: dict[str, Any]) -> None:
    nodes = [{"node": "a", "facts": here, "clock_seconds": 0.0, "rates": {"b": 900.0}}]
    nodes += [{**nodes[0], "node": "b"}]
    assert not any(one.is_problem for one in compare(nodes))
    other = changed(changed(here, "python", "3.12.1"), "packages/ray", "2.50.0")
    nodes[1] |= {
        "facts": other,
        "clock_seconds": 4.2,
        "rates": {"a": 3.0, "c": "OSError: no route"},
    }
    found = {one.subject: one.found for one in compare(nodes) if one.is_problem}
    assert list(found) == [
        "python differs", "ray differs", "clocks", "bandwidth, b to a", "ports, b to c"
    ]  # fmt: skip
    assert "b: 3.12.1" in found["python differs"] and "b: +4.20 s" in found["clocks"]


def test_the_command_says_it_as_text_and_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = cli.main(["doctor", "--json", "impala", "--env.id", "CartPole-v1"])
    shown = json.loads(capsys.readouterr().out)
    assert code == (0 if shown["ok"] else 1)
    subjects = [one["subject"] for one in shown["nodes"][0]["findings"]]
    assert {"python", "cores", "memory", "/dev/shm", "open files", "CUDA", "clock"} <= {*subjects}
    assert cli.main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > len(subjects) and "run back" in lines[-1]


def test_bad_usage_is_an_error_in_three_parts(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--nonsense", "1"], ["--ray.address", "127.0.0.1:1"]):
        assert cli.main(["doctor", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 3
