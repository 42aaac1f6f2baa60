"""The files of docs/clusters: bash can read them, KubeRay's API has their fields, UniRL their
commands.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from unirl.cli import COMMANDS

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "clusters"
SCRIPTS = sorted(FOLDER.glob("*.sh"))

# A part of KubeRay's and Kubernetes' API: field names with their types; "!" marks those that are
# required. Sources: ray-operator/apis/ray/v1/{rayjob,raycluster}_types.go of ray-project/kuberay
# (RayJobSpec, RayClusterSpec, AuthOptions, HeadGroupSpec, WorkerGroupSpec), and the core/v1
# reference of Kubernetes (PodSpec, Container, Volume).
QUANTITIES = {"limits": dict[str, str], "requests": dict[str, str]}
POD = {
    "spec!": {
        "terminationGracePeriodSeconds": int,
        "containers!": [
            {
                "name!": str,
                "image!": str,
                "resources": QUANTITIES,
                "volumeMounts": [{"name!": str, "mountPath!": str}],
            }
        ],
        "volumes": [
            {
                "name!": str,
                "persistentVolumeClaim": {"claimName!": str},
                "emptyDir": {"medium": ("", "Memory"), "sizeLimit": str},
            }
        ],
    }
}
RAY_JOB = {
    "apiVersion!": ("ray.io/v1",),
    "kind!": ("RayJob",),
    "metadata!": {"name!": str},
    "spec!": {
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "entrypoint": str,
        "entrypointNumCpus": float,
        "entrypointNumGpus": float,
        "entrypointResources": str,
        "runtimeEnvYAML": str,
        "shutdownAfterJobFinishes": bool,
        "submissionMode": ("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
        "rayClusterSpec": {
            "rayVersion": str,
            "authOptions": {"mode": ("disabled", "token")},
            "enableInTreeAutoscaling": bool,
            "autoscalerOptions": {
                "idleTimeoutSeconds": int,
                "upscalingMode": ("Default", "Aggressive", "Conservative"),
            },
            "headGroupSpec!": {
                "serviceType": str,
                "rayStartParams!": dict[str, str],
                "template!": POD,
            },
            "workerGroupSpecs": [
                {
                    "groupName!": str,
                    "labels": dict[str, str],
                    "replicas": int,
                    "minReplicas!": int,
                    "maxReplicas!": int,
                    "numOfHosts": int,
                    "rayStartParams!": dict[str, str],
                    "template!": POD,
                }
            ],
        },
    },
}


def misfits(value: Any, schema: Any, path: str = "") -> list[str]:
    """Where a value does not fit the schema."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{path} is no object"]
        known = {name.rstrip("!"): child for name, child in schema.items()}
        missing = [n[:-1] for n in schema if n.endswith("!") and n[:-1] not in value]
        found = [f"{path}.{name} is missing" for name in missing]
        for name, child in value.items():
            if name not in known:
                found.append(f"{path}.{name} is unknown")
            else:
                found += misfits(child, known[name], f"{path}.{name}")
        return found
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{path} is no list"]
        return [m for i, one in enumerate(value) for m in misfits(one, schema[0], f"{path}[{i}]")]
    if isinstance(schema, tuple):
        return [] if value in schema else [f"{path} is {value!r}, not one of {schema}"]
    if schema == dict[str, str]:
        good = isinstance(value, dict) and all(isinstance(one, str) for one in value.values())
        return [] if good else [f"{path} is not from strings to strings"]
    kinds = (int, float) if schema is float else (schema,)
    good = type(value) in kinds
    return [] if good else [f"{path} is {value!r}, no {schema.__name__}"]


@pytest.fixture
def ray_job() -> Any:
    return yaml.safe_load((FOLDER / "kuberay.yaml").read_text())


def test_the_rayjob_fits_the_schema(ray_job: Any) -> None:
    assert misfits(ray_job, RAY_JOB) == []


def test_a_wrong_rayjob_does_not_fit(ray_job: Any) -> None:
    spec = ray_job["spec"]
    spec["backOffLimit"] = spec.pop("backoffLimit")
    spec["rayClusterSpec"]["workerGroupSpecs"][0]["rayStartParams"]["num-cpus"] = 4
    del spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    assert [line.rpartition(".")[2] for line in misfits(ray_job, RAY_JOB)] == [
        "image is missing",
        "rayStartParams is not from strings to strings",
        "backOffLimit is unknown",
    ]


def test_pods_mount_volumes_that_they_have_and_pools_have_bounds(ray_job: Any) -> None:
    cluster = ray_job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {
            mount["name"] for one in pod["containers"] for mount in one["volumeMounts"]
        } <= names
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_bash_can_read_the_scripts() -> None:
    assert SCRIPTS
    for path in SCRIPTS:
        done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_the_commands_are_there_and_no_token_is_in_an_argument(path: Path) -> None:
    text = path.read_text()
    words = set(re.findall(r"\bunirl ([a-z]+) (?!is|outlives)", text))
    assert words <= set(COMMANDS)
    assert not re.search(r"--[a-z-]*token\b", text)
    assert not re.search(r"\bray stop\b", re.sub(r"#.*", "", text))
