"""Weights arrive as they were sent, and a worker that computes with others is found out."""

from __future__ import annotations

import json
import os
import socket
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import forked
from unirl.device import PIECE_BYTES
from unirl.llm.engines.vllm.model_tensors import computed_tensors
from unirl.llm.engines.vllm.worker import map_shared, read_file
from unirl.llm.models.checksum import checksum, digits
from unirl.llm.weights.group import join
from unirl.llm.weights.layout import MemoryLayout
from unirl.llm.weights.proof import (
    NUM_COLUMNS,
    canonical,
    columns,
    differences,
    expected,
    sampled,
)
from unirl.llm.weights.transfer import CollectiveSender, FileSender, SharedMemorySender


def some_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.embed_tokens.weight": torch.randn(40, 24, generator=generator),
        "model.layers.0.q_proj.weight": torch.randn(16, 24, generator=generator),
        "model.layers.0.k_proj.weight": torch.randn(8, 24, generator=generator),
        "model.layers.0.norm.weight": torch.randn(24, generator=generator),
        "steps": torch.tensor([3, 4, 5]),
    }


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=5),
    half=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_what_was_laid_down_is_read_back(shapes: list[list[int]], half: bool) -> None:
    weights = {f"w{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    dtype = torch.bfloat16 if half else torch.float32
    layout = MemoryLayout.of(weights, dtype)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(weights, memory)
    table = json.loads(json.dumps(layout.as_json()))
    found = MemoryLayout.from_json(table).views(memory)
    assert list(found) == list(weights)
    for name, value in weights.items():
        assert torch.equal(found[name], value.to(dtype))


@given(shapes=st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=5))
@settings(max_examples=60, deadline=None)
def test_sender_and_receiver_agree_on_the_size_of_the_memory(shapes: list[list[int]]) -> None:
    layout = MemoryLayout.of({f"w{i}": torch.zeros(shape) for i, shape in enumerate(shapes)})
    info = MemoryLayout.from_json(json.loads(json.dumps(layout.as_json())))
    assert info == layout
    assert info.num_bytes == layout.num_bytes
    assert layout.num_bytes % 64 == 0


def test_a_table_that_reaches_beyond_the_memory_is_refused() -> None:
    layout = MemoryLayout.of(some_weights())
    with pytest.raises(ValueError, match="bytes"):
        layout.views(torch.zeros(100, dtype=torch.uint8))


def test_no_name_of_a_dtype_is_taken_for_anything_else() -> None:
    with pytest.raises(ValueError, match="no dtype"):
        MemoryLayout.from_json([["w", "load", [1], 0]])


def answered(pipe: Connection) -> str:
    """What the other process says, in time."""
    assert pipe.poll(60)
    return str(pipe.recv())


def read_two(pipe: Connection) -> None:
    for _ in range(2):
        info = json.loads(pipe.recv())
        weights = MemoryLayout.from_json(info["table"]).views(map_shared(info["path"]))
        pipe.send(f"{checksum(weights):016x}")


def test_another_process_reads_shared_memory_to_the_bit() -> None:
    sender, (ours, theirs) = SharedMemorySender(), Pipe()
    reader = forked.start(read_two, theirs, forks=False)
    for seed in (0, 1):
        info = sender.write(some_weights(seed), torch.bfloat16)
        ours.send(json.dumps(info))
        assert answered(ours) == info["checksum"]
    reader.join(60)
    assert reader.exitcode == 0
    ours.close()
    theirs.close()
    sender.close()
    sender.close()


def test_shared_memory_goes_with_its_sender() -> None:
    sender = SharedMemorySender()
    info = sender.write(some_weights(), torch.float32)
    descriptors = len(os.listdir("/proc/self/fd"))
    view = map_shared(info["path"])
    sender.close()
    assert not os.path.exists(info["path"]) or len(os.listdir("/proc/self/fd")) < descriptors
    assert int(view.sum()) > 0  # a process that mapped it may read on


def test_a_file_holds_the_newest_weights_alone(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the file is one of safetensors")
    sender = FileSender(str(tmp_path))
    for seed in (0, 1):
        info = sender.write(some_weights(seed), torch.float32)
        assert len(list(tmp_path.iterdir())) == 1
        assert f"{checksum(dict(read_file(info['path']))):016x}" == info["checksum"]
    sender.close()
    assert not list(tmp_path.iterdir())


def receive(pipe: Connection, info: dict[str, Any]) -> None:
    group = join(rank=1, **info)
    layout = MemoryLayout.from_json(json.loads(pipe.recv()))
    memory = torch.empty(layout.num_bytes, dtype=torch.uint8)
    group.broadcast([memory])
    pipe.send(f"{checksum(layout.views(memory)):016x}")


def listening() -> set[tuple[str, int]]:
    """Addresses (as the kernel writes them) and ports that this process listens on."""
    own = {os.readlink(f.path) for f in os.scandir("/proc/self/fd") if os.path.islink(f.path)}
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, _, port = fields[1].rpartition(":")
                found.add((address, int(port, 16)))
    return found


def test_weights_of_odd_sizes_reach_another_process_and_no_other_can_listen() -> None:
    before = listening()
    sender = CollectiveSender(1, torch.device("cpu"), 60.0)
    info = {k: v for k, v in sender.introduction().items() if k != "kind"}
    weights = {"w": torch.randn(5, 3), "b": torch.randn(7)}  # 28 bytes at the end
    ours, theirs = Pipe()
    worker = forked.start(receive, theirs, info, forks=False)
    sender.connect()
    opened = listening() - before
    sent = sender.write(weights, torch.float32)
    ours.send(json.dumps(sent["table"]))
    sender.push()
    assert answered(ours) == sent["checksum"]
    worker.join(60)
    sender.close()
    ours.close()
    theirs.close()
    assert info["port"] in {port for _, port in opened}
    assert {address for address, _ in opened} == {"0100007F"}  # 127.0.0.1


def test_the_port_of_a_collective_is_taken_from_the_moment_it_is_named() -> None:
    sender = CollectiveSender(1, torch.device("cpu"), 5.0)
    port = sender.introduction()["port"]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    sender.close()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_group_of_two_broadcasts_to_the_bit() -> None:
    sender = CollectiveSender(1, torch.device("cpu"), 20.0)
    info = {k: v for k, v in sender.introduction().items() if k != "kind"}
    received: dict[str, torch.Tensor] = {}

    def worker() -> None:
        group = join(rank=1, **info)
        received["memory"] = torch.empty(layout.num_bytes, dtype=torch.uint8)
        group.broadcast([received["memory"]])

    weights = some_weights()
    layout = MemoryLayout.of(weights)
    thread = threading.Thread(target=worker)
    thread.start()
    sender.connect()
    sent = sender.write(weights, torch.float32)
    sender.push()
    thread.join(20)
    found = MemoryLayout.from_json(sent["table"]).views(received["memory"])
    assert f"{checksum(found):016x}" == sent["checksum"]
    sender.close()


def test_a_member_that_does_not_come_is_waited_for_no_longer_than_allowed() -> None:
    sender = CollectiveSender(1, torch.device("cpu"), 0.5)
    with pytest.raises(RuntimeError):
        sender.connect()


def test_other_columns_are_read_with_each_version_and_in_time_all() -> None:
    seen: set[int] = set()
    for version in range(60):
        picked = columns(100, version)
        assert len(picked) == NUM_COLUMNS
        assert picked == columns(100, version)
        seen.update(picked)
    assert seen == set(range(100))
    assert columns(3, 1) == [0, 1, 2]


def test_the_sign_of_zero_is_no_difference() -> None:
    plus, minus = torch.zeros(4, 4), -torch.zeros(4, 4)
    assert checksum({"w": plus}) != checksum({"w": minus})
    assert digits({"w": canonical(plus, plus.dtype)}) == digits({"w": canonical(minus, plus.dtype)})


class _Packed(nn.Module):
    """A linear layer as vLLM keeps it on CPU: the weight is gone into a kernel's own copy."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.pack(parts)

    def pack(self, parts: list[torch.Tensor]) -> None:
        kept = torch.cat(parts).T.contiguous()
        self.cpu_linear = lambda x, weight, bias: x @ kept


class VocabParallelEmbedding(nn.Module):
    """As vLLM's: the vocabulary is padded."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        padded = torch.cat([weight, torch.zeros(8, weight.shape[1])])
        self.weight = nn.Parameter(padded, requires_grad=False)


class ParallelLMHead(VocabParallelEmbedding):
    """Tied to the embedding, with a packed copy of its own."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        nn.Module.__init__(self)
        self.weight = embedding.weight
        kept = embedding.weight.detach().T.clone()
        self.cpu_linear = lambda x, weight, bias: x @ kept


class _Model(nn.Module):
    packed_modules_mapping = {"qk_proj": ["q_proj", "k_proj"]}  # noqa: RUF012

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        layer = nn.Module()
        self.fused = layer.qk_proj = _Packed(self._parts(weights))
        layer.norm = nn.LayerNorm(24, bias=False)
        layer.norm.weight.data = weights["model.layers.0.norm.weight"].clone()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([layer])
        self.model.embed_tokens = VocabParallelEmbedding(weights["model.embed_tokens.weight"])
        self.lm_head = ParallelLMHead(self.model.embed_tokens)
        del self.fused

    @staticmethod
    def _parts(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [weights[f"model.layers.0.{name}.weight"] for name in ("q_proj", "k_proj")]

    def load(self, weights: dict[str, torch.Tensor]) -> None:
        """As vLLM reloads: all but the head's copy."""
        self.model.layers[0].qk_proj.pack(self._parts(weights))  # type: ignore[operator, union-attr]
        self.model.layers[0].norm.weight.data = weights["model.layers.0.norm.weight"]  # type: ignore[union-attr]
        rows = weights["model.embed_tokens.weight"]
        self.model.embed_tokens.weight.data[: len(rows)] = rows  # type: ignore[union-attr, operator, index]


def report(model: nn.Module, weights: dict[str, torch.Tensor], version: int) -> list[list[str]]:
    shapes = {name: tuple(value.shape) for name, value in weights.items()}
    return [
        [path, name, digits({name: canonical(value, torch.float32)})]
        for path, name, value in computed_tensors(model, shapes, version)
    ]


def test_the_proof_reads_fused_padded_and_tied_weights_back_to_the_bit() -> None:
    weights = some_weights()
    del weights["steps"]
    computed = report(_Model(weights), weights, 3)
    assert {path for path, _, _ in computed} == {
        "model.layers.0.qk_proj.weight",
        "model.layers.0.norm.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    }
    assert differences(expected(weights, 3, torch.float32), computed, []) == ""


def test_the_proof_finds_a_tied_head_that_kept_its_old_copy() -> None:
    old, new = some_weights(0), some_weights(1)
    model = _Model(old)
    model.load(new)
    wrong = differences(
        expected({k: v for k, v in new.items() if k != "steps"}, 4, torch.float32),
        report(model, new, 4),
        [],
    )
    assert wrong.startswith("lm_head.weight (sent as model.embed_tokens.weight) of 5 readings")


def test_the_proof_finds_tensors_that_never_arrived() -> None:
    weights = some_weights()
    computed = report(_Model(weights), weights, 5)
    assert "1 of 5 tensors never arrived, such as steps" in differences(
        expected(weights, 5, torch.float32), computed, []
    )
    assert differences(expected(weights, 5, torch.float32), computed, ["steps"]) == ""


def test_one_changed_weight_in_a_read_column_is_a_difference() -> None:
    weights: dict[str, Any] = some_weights()
    wanted = expected(weights, 6, torch.bfloat16)
    changed = weights["model.layers.0.q_proj.weight"].clone()
    changed[7, columns(24, 6)[3]] += 0.5
    name = "model.layers.0.q_proj.weight"
    assert digits({name: sampled(changed, 6, torch.bfloat16)}) != wanted[name]


@pytest.mark.parametrize("num_bytes", [64, 128, 2**20])
def test_pieces_are_the_whole_memory_one_after_the_other(num_bytes: int) -> None:
    """What a collective sends needs one piece of room, however large the model is."""
    weights = {**some_weights(), "odd": torch.randn(37, 3), "count": torch.arange(9)}
    layout = MemoryLayout.of(weights, torch.bfloat16)
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    layout.write(weights, memory)
    pieces = layout.pieces(weights, torch.zeros(num_bytes, dtype=torch.uint8))
    joined = torch.cat([piece.clone() for piece in pieces])
    found, wanted = layout.views(joined), layout.views(memory)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert checksum(weights, torch.bfloat16) == checksum(wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_of_a_gpu_reach_the_host_without_a_copy_on_it(dtype: torch.dtype) -> None:
    weights = {"large": torch.randn(2**26, device="cuda"), "small": torch.randn(3, device="cuda")}
    sender = SharedMemorySender()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    info = sender.write(weights, dtype)
    assert torch.cuda.max_memory_allocated() - before <= 2 * PIECE_BYTES
    found = MemoryLayout.from_json(info["table"]).views(map_shared(info["path"]))
    assert torch.equal(found["large"], weights["large"].to(dtype).cpu())
    sender.close()
