"""The processes that train one policy together, each on samples of its own, started by torchrun:
sums over all of them, comparisons, and errors that say which one is lost.

A process alone never touches torch.distributed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

from unirl.device import device_of_rank, finish_on_host, gpu_of, with_index
from unirl.errors import ActorFailed, UniRLError
from unirl.host import local_rank
from unirl.vtrace.advantages import Reduce

log = logging.getLogger(__name__)

T = TypeVar("T")
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TEXT_BYTES = 32
_MEETING_SECONDS = 300.0
"""How long the first may wait for the last to start, at least: imports and compilers take time."""
_GRACE_SECONDS = 5.0
"""How long the ranks that are left wait for each other before they name the silent ones."""


class RankLost(ActorFailed):
    """Another process of the training failed, died or hangs. The learner here is sound: what was
    summed was summed by all, and a step that could not be summed was not made.
    """


class Ranks:
    """This process among `world_size` ones; rank 0 is the main one: it alone writes, and decides
    when to end.

    meet_at: the store of torch.distributed where they meet, with a timeout; None: as the
    environment of torchrun's processes says.

    Every method that sums or compares is called by all ranks, in one order. It returns the same
    bits to each of them, or raises RankLost by the deadline. Alone, all of them return their input.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        local_rank: int = 0,
        *,
        meet_at: Callable[[timedelta], Any] | None = None,
    ) -> None:
        self.rank, self.world_size, self.local_rank = rank, world_size, local_rank
        self._meet_at = meet_at
        self._deadline_seconds = 0.0
        self._store: Any = None
        self._nccl: Any = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """As torchrun says; alone where it does not."""
        local = local_rank(environment)
        if local is None or any(name not in environment for name in _VARIABLES):
            return cls()
        return cls(int(environment["RANK"]), int(environment["WORLD_SIZE"]), local)

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes and decides."""
        return self.rank == 0

    @property
    def reduce(self) -> Reduce | None:
        """`sum` for those who can do without; None when alone."""
        return None if self.world_size == 1 else self.sum

    def own_device(self, device: str) -> str:
        """This rank's own device of that kind: see device_of_rank; cpu is cpu."""
        if self.world_size == 1 or not device.startswith("cuda"):
            return device
        own = device_of_rank("cuda", self.local_rank)
        if device not in ("cuda", own):
            raise UniRLError(
                f"rank {self.rank} of {self.world_size} was given device {device}",
                f"each process has a device of its own, and this one's is {own}",
                'set the device to "auto" or "cuda"',
            )
        return own

    @contextmanager
    def joined(self, deadline_seconds: float) -> Iterator[None]:
        """Meet the others, and leave them; an error is reported to them before it is raised.

        deadline_seconds: how long one waits for the others each time; longer the first time.
        """
        if self.world_size == 1:
            yield
            return
        self._join(deadline_seconds)
        try:
            yield
        except BaseException as error:
            self._report("" if isinstance(error, RankLost) else f"{type(error).__name__}: {error}")
            if self._meet_at is not None:  # this process may meet others again
                with contextlib.suppress(Exception):
                    torch.distributed.destroy_process_group()
            raise
        torch.distributed.destroy_process_group()
        self._store = self._nccl = None

    def _join(self, deadline_seconds: float) -> None:
        import torch.distributed

        dist: Any = torch.distributed
        if dist.is_initialized():
            raise UniRLError(
                "torch.distributed is initialised already",
                f"rank {self.rank} makes a group with a deadline and CPU and CUDA backends",
                "leave init_process_group to UniRL",
            )
        self._deadline_seconds, deadline = deadline_seconds, timedelta(seconds=deadline_seconds)
        meeting_seconds = max(deadline_seconds, _MEETING_SECONDS)
        try:
            meeting = timedelta(seconds=meeting_seconds)
            if self._meet_at is not None:
                store = self._meet_at(meeting)
            else:
                store, _, _ = next(
                    dist.rendezvous("env://", self.rank, self.world_size, timeout=meeting)
                )
            # Keys of its own for each meeting: what an earlier one left there is not read again.
            number = store.add(f"unirl/meetings/{self.rank}", 1)
            self._store = dist.PrefixStore(f"unirl/{number}", store)
            self._store.set(f"here/{self.rank}", _own_gpu(self.local_rank))
            everyone = [f"here/{rank}" for rank in range(self.world_size)]
            self._store.wait(everyone, meeting)
            gpus = [self._store.get(key).decode() for key in everyone]
            # NCCL refuses two processes on one GPU.
            with_nccl = all(gpus) and len({*gpus}) == len(gpus) and dist.is_nccl_available()
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if with_nccl else "gloo",
                store=self._store,
                rank=self.rank,
                world_size=self.world_size,
                timeout=deadline,
            )
            if with_nccl:
                # Its watchdog ends the process: not before `finish_on_host` has named who is lost.
                patience = timedelta(seconds=2 * deadline_seconds + 60)
                self._nccl = dist.group.WORLD._get_backend(torch.device("cuda"))
                self._nccl.set_timeout(patience)
        except (RuntimeError, ValueError) as error:
            address = "the port of the first"
            if self._meet_at is None:
                address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise RankLost(
                f"rank {self.rank} of {self.world_size} did not meet the others at {address}",
                f"all must come within {meeting_seconds:g} s: {_gist(error)}",
                "see whether all processes were started, and reach that address",
            ) from error

    def sum(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Each tensor summed over all ranks, in its own dtype; one message for all of them, in the
        dtype that holds them all. They are on one device. Without gradient.
        """
        if self.world_size == 1 or not tensors:
            return list(tensors)
        import torch.distributed as dist

        dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
        flat = torch.cat([tensor.detach().reshape(-1).to(dtype) for tensor in tensors])
        limit = self._deadline_seconds
        self._meet(
            (lambda: finish_on_host(dist.all_reduce(flat, async_op=True), limit))
            if flat.is_cuda
            else (lambda: dist.all_reduce(flat))
        )
        sums = torch.split(flat, [tensor.numel() for tensor in tensors])
        return [
            total.reshape(tensor.shape).to(tensor.dtype)
            for total, tensor in zip(sums, tensors, strict=True)
        ]

    def count(self, *numbers: int) -> list[int]:
        """Each number of the host summed over all ranks; no device waits for it."""
        if self.world_size == 1:
            return list(numbers)
        (totals,) = self.sum([torch.tensor(numbers, dtype=torch.int64)])
        return [int(total) for total in totals]

    def leading(self, number: float) -> float:
        """This number of the host as the rank that decides has it."""
        if self.world_size == 1:
            return number
        own = number if self.is_main else 0.0
        (total,) = self.sum([torch.tensor(own, dtype=torch.float64)])
        return float(total)

    def share(self, own: T) -> list[T]:
        """What every rank gave, in their order. It is pickled: small things, without tensors of a
        device.
        """
        if self.world_size == 1:
            return [own]
        import torch.distributed as dist

        found: list[Any] = [None] * self.world_size
        self._meet(lambda: dist.all_gather_object(found, own))
        return found

    def first_text(self, text: str | None) -> str | None:
        """The text of the lowest rank that has one; at most 32 bytes."""
        if self.world_size == 1:
            return text
        import torch.distributed as dist

        own = torch.tensor(list((text or "").encode().ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        self._meet(lambda: dist.all_gather(found, own))
        texts = (bytes(row).rstrip(b"\0").decode() for row in found)
        return next(filter(None, texts), None)

    def require_alike(self, **facts: str) -> None:
        """Raise UniRLError unless every fact is the same on all ranks."""
        found = self.share(facts)
        for name in facts:
            other = [rank for rank, theirs in enumerate(found) if theirs[name] != found[0][name]]
            if other:
                raise UniRLError(
                    f"rank {other[0]} of {self.world_size} differs from rank 0 in its {name}",
                    "all processes of a training must begin alike",
                    "start them with one command, one version and one folder to resume from",
                )

    def _meet(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            lost = self._lost(error)
            if self._nccl is not None:
                # What still waits on the GPU would keep the checkpoint waiting, too.
                with contextlib.suppress(RuntimeError):
                    self._nccl.abort()
            if self.is_main:
                # Here as well: what follows is a checkpoint, perhaps of a device that hangs.
                log.error("%s", lost)
            raise lost from error

    def _lost(self, error: RuntimeError) -> RankLost:
        """Names a rank that reported an error, else those that report nothing."""
        self._report("")
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        reports = self._reports_of(others)
        for rank, report in reports.items():
            if report:
                return RankLost(
                    f"rank {rank} of {self.world_size} failed: {report}",
                    "the ranks of a training continue together or not at all",
                    "fix that, then continue from the newest checkpoint: unirl resume",
                )
        silent = [str(rank) for rank in others if rank not in reports]
        return RankLost(
            f"rank {', '.join(silent)} of {self.world_size} is gone or does not answer"
            if silent
            else f"rank {self.rank} of {self.world_size} lost its connection to the others",
            f"all ranks must meet at every update, within {self._deadline_seconds:g} s "
            f"(queue.timeout_seconds): {_gist(error)}",
            "see what it wrote last, then continue from the newest checkpoint: unirl resume",
        )

    def _report(self, failure: str) -> None:
        """Tell the others that this rank is there, and why it is about to end."""
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(f"report/{self.rank}", failure)

    def _reports_of(self, others: Sequence[int]) -> dict[int, str]:
        """What each of the others has reported by the end of the grace period; silent ones lack."""
        reports: dict[int, str] = {}
        ends = time.monotonic() + _GRACE_SECONDS
        with contextlib.suppress(RuntimeError):  # the rank that keeps the store may be the dead one
            while self._store is not None:
                for rank in others:
                    if rank not in reports and self._store.check([f"report/{rank}"]):
                        reports[rank] = self._store.get(f"report/{rank}").decode()
                is_complete = len(reports) == len(others) or any(reports.values())
                if is_complete or time.monotonic() > ends:
                    break
                time.sleep(0.1)
        return reports


def _own_gpu(local_rank: int) -> str:
    """Make this process' GPU the current one; what names it among those of all machines, or ""."""
    if not torch.cuda.is_available():
        return ""
    own = with_index(torch.device(device_of_rank("cuda", local_rank)))
    torch.cuda.set_device(own)
    return gpu_of(own)


def _gist(error: Exception) -> str:
    """The first sentence of what torch says, without the line in its source."""
    return re.split(r"\.?\s*\n|\. ", re.sub(r"^\[[^\]]*\] ?", "", str(error).strip()))[0]
