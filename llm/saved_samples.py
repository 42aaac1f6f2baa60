"""Groups of completions in files: rollouts are written without learning, or learned from without
rollouts. For looking into one half of a run at a time.

Each batch is `batch_00000012.safetensors`, with the fields of every group, and a .json beside it
that says of what sizes and by which settings; the run folder has them in samples/groups.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unirl.core.actor import ActorContext
from unirl.core.learner import LearnerContext, LearnerState
from unirl.core.sample import Batch, Slot
from unirl.core.seeding import derive_seed
from unirl.core.weights import Weights, WeightStore
from unirl.errors import UniRLError
from unirl.learners.parallel import Ranks
from unirl.llm import assembly, generating
from unirl.llm.assembly import LanguageFacts
from unirl.llm.evaluate import LlmEvaluator
from unirl.llm.group import Group, GroupShape, read_group
from unirl.llm.language_config import LanguageConfig
from unirl.llm.models.lora import add_adapters
from unirl.llm.models.model import load_model, load_tokenizer
from unirl.llm.packages import needs
from unirl.llm.tasks.prompts import PromptIndex
from unirl.llm.training.report import report_groups
from unirl.llm.training.token_batch import TokenBatch
from unirl.llm.weights.transfer import save_tensors
from unirl.metrics.metrics import Metrics
from unirl.storage import disk

FOLDER = "groups"
_KIND = "unirl groups"
_FIELDS = (
    "prompt", "token", "logp", "mask", "version", "starts", "finish", "reward", "outcome",
)  # fmt: skip
_NOTES = (
    "num_groups", "group_size", "max_prompt", "max_tokens", "largest_token", "temperature",
    "rewards", "task",
)  # fmt: skip
_NOT_SAVED = (
    "generate_seconds", "reward_seconds", "retries", "compute_seconds", "engine_seconds",
)  # fmt: skip


@dataclass(frozen=True)
class SavedGroups:
    """What a folder of saved groups holds; the tensors stay on the disk."""

    locations: tuple[tuple[Path, int], ...]
    """File and number of each group, in the order in which they were written."""
    shape: GroupShape
    largest_token: int
    temperature: float
    rewards: tuple[str, ...]
    task: str | list[str]
    """As TaskConfig.names."""

    @classmethod
    def find(cls, where: Path) -> SavedGroups:
        """In a run folder, or in the folder of the files. Raises UniRLError when there are none, or
        they do not belong together.
        """
        found = [where / "samples" / FOLDER, where / FOLDER, where]
        notes = next((files for each in found if (files := sorted(each.glob("batch_*.json")))), [])
        if not notes:
            raise UniRLError(
                f"no saved groups in {where}",
                "samples must name a run that was made with --only rollout",
                "make one: unirl train grpo --only rollout",
            )
        read = [_read_note(path) for path in notes]
        first = read[0]
        for path, note in zip(notes, read, strict=True):
            for name in ("group_size", "temperature", "rewards", "task"):
                if note[name] != first[name]:
                    raise UniRLError(
                        f"{path} does not belong to {notes[0].name}",
                        f"their {name} are {note[name]} and {first[name]}",
                        "keep the groups of different runs in different folders",
                    )
        max_prompt, max_tokens, largest_token = (
            max(int(note[name]) for note in read)
            for name in ("max_prompt", "max_tokens", "largest_token")
        )
        return cls(
            locations=tuple(
                (path.with_suffix(".safetensors"), i)
                for path, note in zip(notes, read, strict=True)
                for i in range(int(note["num_groups"]))
            ),
            shape=GroupShape(
                int(first["group_size"]), max_prompt, max_tokens, len(first["rewards"])
            ),
            largest_token=largest_token,
            temperature=float(first["temperature"]),
            rewards=tuple(first["rewards"]),
            task=first["task"],
        )

    def load(self, index: int) -> Group:
        path, i = self.locations[index]
        with needs("safetensors", f"saved groups {path} cannot be read"):
            from safetensors import safe_open
        try:
            with safe_open(path, "pt") as file:
                tensors = {name: file.get_tensor(f"{i}.{name}") for name in _FIELDS}
        except Exception as error:  # the library's own type for a file that is not whole
            raise UniRLError(
                f"saved groups {path} cannot be read: {error}",
                "each .json has its .safetensors beside it",
                "copy the whole folder, or delete both files of this batch",
            ) from error
        return Group(**tensors, ticket=index)


def save_groups(
    groups: Sequence[Group],
    path: Path,
    *,
    temperature: float,
    rewards: Sequence[str],
    task: str | list[str],
) -> None:
    """Write a batch; path without suffix. A process that is killed leaves no note of half a
    file.
    """
    tensors = {
        f"{i}.{name}": getattr(group, name) for i, group in enumerate(groups) for name in _FIELDS
    }
    note = {
        "kind": _KIND,
        "num_groups": len(groups),
        "group_size": groups[0].size,
        "max_prompt": max(one.prompt.numel() for one in groups),
        "max_tokens": max(int(one.lengths.max()) for one in groups),
        "largest_token": max(
            int(ids.max()) for one in groups for ids in (one.prompt, one.token) if ids.numel()
        ),
        "temperature": temperature,
        "rewards": list(rewards),
        "task": task,
        "tickets": [one.ticket for one in groups],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk.replacing(path.with_suffix(".safetensors")) as aside:
        save_tensors(tensors, aside)
    disk.replace_text(path.with_suffix(".json"), json.dumps(note) + "\n")


class SavingLearner:
    """Its weights stay as they are, and batches are kept until they are written; not those of
    agents, whose actors store their episodes.
    """

    def __init__(self, weights: Weights, config: LanguageConfig) -> None:
        self.version = self.num_steps = 0
        self._weights, self._config = weights, config
        self._rewards = config.reward.weight_of
        self._batches: list[tuple[int, list[Group]]] = []

    def step(self, batch: Batch) -> Metrics:
        metrics = Metrics()
        groups = [read_group(slot.data, slot.ticket).copy() for slot in batch.slots]
        tokens = TokenBatch.of(groups, tuple(self._rewards.values()))
        report_groups(tokens, batch, self.version, tuple(self._rewards), metrics)
        if self._config.agent_config is None:
            self._batches.append((self.version, groups))
        self.num_steps += tokens.size
        metrics.total("charts/episodes", tokens.size)
        self.version += 1
        return metrics

    def keep_samples(self, folder: Path) -> None:
        batches, self._batches = self._batches, []
        for number, groups in batches:
            save_groups(
                groups,
                folder / FOLDER / f"batch_{number:08d}",
                temperature=self._config.sampling.temperature,
                rewards=tuple(self._rewards),
                task=self._config.task.names,
            )

    def weights(self) -> Weights:
        return self._weights

    def state_dict(self) -> LearnerState:
        """There is nothing but counters."""
        return LearnerState({}, {})

    def load_state_dict(self, state: LearnerState) -> None:
        pass


class Replay:
    """Saved groups, each once before any comes again, in an order of the seed's.

    ranks: processes that share the samples; ticket n of each is sample rank + world_size * n. A
    sample counts as new; how far its log-probabilities are from the policy's is in the losses.
    """

    def __init__(
        self, saved: SavedGroups, weights: WeightStore, *, seed: int, ranks: Ranks
    ) -> None:
        self._saved, self._weights, self._seed, self._ranks = saved, weights, seed, ranks
        self._epoch, self._order = -1, torch.empty(0)

    def produce(self, slot: Slot) -> None:
        number = self._ranks.rank + self._ranks.world_size * slot.pool_ticket
        epoch, index = divmod(number, len(self._saved.locations))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, "replay", epoch))
            self._order = torch.randperm(len(self._saved.locations), generator=generator)
            self._epoch = epoch
        version = self._weights.version
        _fill(slot.data, self._saved.load(int(self._order[index])), version)
        slot.first_version = slot.last_version = version

    def restart(self, seed: int) -> None:
        """Nothing to put back: a sample depends on its ticket alone."""

    def close(self) -> None:
        pass


def probe(config: LanguageConfig, samples: str) -> LanguageFacts:
    """What a plan needs that learns from saved groups. Raises UniRLError where they do not fit, and
    for settings of what is not done: generating.
    """
    require_no_rollout(config)
    saved = SavedGroups.find(Path(samples).expanduser())
    rewards = tuple(config.reward.weight_of)
    checks: tuple[tuple[bool, str, object, object], ...] = (
        (saved.shape.group_size == config.rollout.group_size, "rollout.group_size",
         saved.shape.group_size, config.rollout.group_size),
        (saved.shape.max_tokens <= config.sampling.max_tokens, "sampling.max_tokens",
         saved.shape.max_tokens, config.sampling.max_tokens),
        (saved.temperature == config.sampling.temperature, "sampling.temperature",
         saved.temperature, config.sampling.temperature),
        (saved.rewards == rewards, "reward.weights", ", ".join(saved.rewards), ", ".join(rewards)),
    )  # fmt: skip
    for fits, key, found, wanted in checks:
        if not fits:
            raise UniRLError(
                f"the saved groups in {samples} do not fit {key}",
                f"they have {found}, the config says {wanted}",
                f"set {key} as it was when they were made",
            )
    known = len(load_tokenizer(config.model))
    if saved.largest_token >= known:
        raise UniRLError(
            f"the saved groups in {samples} are of another model",
            f"they have token {saved.largest_token}, {config.model.path} knows {known}",
            "set model.path to a model with the same tokenizer",
        )
    if config.run.eval_steps:
        _require_task(config, saved.task)
    return assembly.probe(config, saved.shape, saved.task)


def make_evaluator(
    seed: int, *, config: LanguageConfig, task: str | list[str], index: PromptIndex | None = None
) -> LlmEvaluator:
    _require_task(config, task)
    return generating.make_evaluator(seed, config=config, index=index)


def make_replay(context: ActorContext, *, config: LanguageConfig, samples: str) -> Replay:
    saved = SavedGroups.find(Path(samples).expanduser())
    return Replay(saved, context.weights, seed=config.run.seed, ranks=Ranks.from_environment())


def make_saver(context: LearnerContext, *, config: LanguageConfig) -> SavingLearner:
    model = add_adapters(load_model(config.model), config.model)
    return SavingLearner(assembly.publisher(config)(model), config)


def require_no_rollout(config: LanguageConfig) -> None:
    rollout = config.rollout
    for key, found in (
        ("rollout.function", rollout.function),
        ("rollout.filter", rollout.filter),
        ("rollout.zero_variance", "discard" if rollout.zero_variance == "discard" else ""),
        ("mode", "colocated" if config.mode == "colocated" else ""),
    ):
        if found:
            raise UniRLError(
                f"only = train with {key} {found}",
                "it says how groups are made, and here they come from files as they are",
                f"leave {key} out; it counts where the groups are made",
            )


def _require_task(config: LanguageConfig, task: str | list[str]) -> None:
    if config.task.names != task:
        raise UniRLError(
            f"evaluations would ask task {config.task.names}",
            f"the saved groups are of {task}",
            "set task.name, and its options, as they were when the groups were made",
        )


def _fill(data: Mapping[str, Any], group: Group, version: int) -> None:
    """A group into a slot's tree, as if it were of this version."""
    begin = group.prompt.numel()
    end = begin + group.token.numel()
    data["token"][:begin], data["token"][begin:end] = group.prompt, group.token
    for name in ("logp", "mask"):
        data[name].zero_()
        data[name][begin:end] = getattr(group, name)
    data["version"].fill_(-1)
    data["version"][begin:end] = version
    data["starts"].copy_(group.starts + begin)
    for name in ("finish", "reward", "outcome"):
        data[name].copy_(getattr(group, name))
    for name in _NOT_SAVED:
        data[name].zero_()


def _read_note(path: Path) -> dict[str, Any]:
    try:
        note = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _no_note(path, str(error)) from error
    missing = [name for name in _NOTES if name not in note]
    if note.get("kind") != _KIND or missing:
        raise _no_note(path, f"it lacks {', '.join(missing) or 'its kind'}")
    return dict(note)


def _no_note(path: Path, why: str) -> UniRLError:
    return UniRLError(
        f"{path} does not describe saved groups",
        why,
        "copy the whole folder of the run again, or make it again",
    )
