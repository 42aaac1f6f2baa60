"""Checkpoints: what was saved comes back bit for bit, or an error says what to use instead."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.storage.saving import save
from unirl.errors import UniRLError
from unirl.storage.checkpoint import latest, list_checkpoints, load_checkpoint, save_checkpoint

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]


def damage(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    high = 2 if dtype == torch.bool else 256
    noise = torch.randint(high, (3, 5, dtype.itemsize), dtype=torch.uint8, generator=generator)
    bits = noise.view(dtype).reshape(3, 5)
    odd = torch.zeros(3, dtype=torch.uint8)  # not a multiple of the wider items that follow
    save(tmp_path, 1, model={"odd": odd, "bits": bits, "scalar": bits[1, 1], "none": bits[:0]})
    loaded = load_checkpoint(tmp_path).model
    assert loaded["bits"].dtype == dtype
    assert loaded["scalar"].shape == () and loaded["none"].shape == (0, 5)
    assert torch.equal(loaded["bits"].view(torch.uint8), bits.view(torch.uint8))
    assert torch.equal(
        loaded["scalar"].reshape(1).view(torch.uint8), bits[1, 1:2].view(torch.uint8)
    )


def test_strided_shared_and_trainable_tensors_come_back_equal(tmp_path: Path) -> None:
    base = torch.arange(48.0).reshape(2, 3, 2, 4)
    model = {
        "image": base.contiguous(memory_format=torch.channels_last),
        "transposed": base[0, 0].T,
        "strided": base[..., ::2],
        "expanded": torch.ones(1).expand(3, 2),
        "tied": base,
        "trainable": torch.nn.Parameter(base + 1),
        "conjugate": torch.complex(base, base).conj(),
    }
    save(tmp_path, 1, model=model)
    loaded = load_checkpoint(tmp_path).model
    for name, tensor in model.items():
        assert torch.equal(loaded[name], tensor), name
    loaded["tied"].add_(1)  # what was loaded may be written to, and its neighbours do not move
    assert torch.equal(loaded["image"], model["image"])


def test_the_structure_of_trees_survives(tmp_path: Path) -> None:
    optimizer = {
        "empty": {},
        "nested": {"empty": {"": {}}},
        "step": torch.tensor(3.0),
        "lr": 3e-4,
        "count": 2**70,
        "nan": -math.inf,
        "amsgrad": False,
        "none": None,
        "name": "Adam",
        "a/b": torch.tensor(1),
        "a": {"b": torch.tensor(2), "": torch.tensor(3)},
        "__metadata__": torch.tensor(4),
    }
    save(tmp_path, 1, model=torch.ones(2), optimizer=optimizer, samples={})
    loaded = load_checkpoint(tmp_path)
    assert torch.equal(loaded.model, torch.ones(2))
    assert loaded.samples == {}
    assert loaded.optimizer == optimizer  # 0-d tensors compare as truth values
    assert type(loaded.optimizer["amsgrad"]) is bool and type(loaded.optimizer["count"]) is int
    assert list(loaded.optimizer) == list(optimizer)


def test_samples_and_state_are_optional_and_exact(tmp_path: Path) -> None:
    state = {"rng": [1, 2**128], "best": -math.inf, "name": "ü\n", "empty": {}, "x": 0.1}
    path = save(tmp_path, 12_000, state=state, samples={"obs": {"camera": torch.ones(2, 3)}})
    assert path == tmp_path / "checkpoints" / "step_00012000"
    loaded = load_checkpoint(tmp_path)
    assert loaded.step == 12_000 and loaded.state == state
    assert torch.equal(loaded.samples["obs"]["camera"], torch.ones(2, 3))
    save(tmp_path, 12_001)
    assert load_checkpoint(tmp_path).samples is None


def test_adam_continues_as_if_never_interrupted(tmp_path: Path) -> None:
    def train(layer: torch.nn.Linear, adam: torch.optim.Adam, num_updates: int) -> None:
        for _ in range(num_updates):
            adam.zero_grad()
            layer(torch.ones(2, 3)).square().sum().backward()
            adam.step()

    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.Adam(layer.parameters(), lr=0.1)
    train(layer, adam, 3)
    slots = {str(index): slots for index, slots in adam.state_dict()["state"].items()}
    save_checkpoint(tmp_path, 3, model=layer.state_dict(), optimizer=slots, state={})
    train(layer, adam, 3)

    resumed = torch.nn.Linear(3, 2)
    resumed_adam = torch.optim.Adam(resumed.parameters(), lr=0.1)
    checkpoint = load_checkpoint(tmp_path)
    resumed.load_state_dict(checkpoint.model)
    groups = resumed_adam.state_dict()["param_groups"]
    state = {int(index): slots for index, slots in checkpoint.optimizer.items()}
    resumed_adam.load_state_dict({"state": state, "param_groups": groups})
    train(resumed, resumed_adam, 3)
    assert torch.equal(layer.weight, resumed.weight) and torch.equal(layer.bias, resumed.bias)


def test_files_are_plain_safetensors_and_json(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save(tmp_path, 1, model={"actor": {"weight": torch.ones(2)}, "bias": torch.zeros(())})
    assert sorted(file.name for file in path.iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert set(load_file(path / "model.safetensors")) == {"actor/weight", "bias"}
    assert json.loads((path / "state.json").read_text())["step"] == 1


def test_any_of_its_folders_names_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    assert os.readlink(checkpoints / "latest") == "step_00000002"
    for where in (tmp_path, checkpoints, checkpoints / "latest", checkpoints / "step_00000002"):
        assert load_checkpoint(where).step == 2
    assert load_checkpoint(checkpoints / "step_00000001").step == 1
    shutil.copytree(checkpoints / "step_00000001", tmp_path / "best")
    assert load_checkpoint(tmp_path / "best").step == 1


def test_without_a_valid_latest_the_highest_complete_step_is_read(tmp_path: Path) -> None:
    for step in (9, 10, 11):
        save(tmp_path, step)
    checkpoints = tmp_path / "checkpoints"
    (checkpoints / "latest").unlink()
    assert load_checkpoint(tmp_path).step == 11
    (checkpoints / "latest").symlink_to("step_00000099")
    assert load_checkpoint(tmp_path).step == 11
    (checkpoints / "step_00000011" / "optimizer.safetensors").unlink()
    assert load_checkpoint(tmp_path).step == 10
    assert latest(tmp_path) == list_checkpoints(tmp_path)[-1]


def test_the_newest_n_stay_and_a_rewound_run_never_deletes_its_latest(tmp_path: Path) -> None:
    def steps() -> list[int]:
        return [int(path.name.removeprefix("step_")) for path in list_checkpoints(tmp_path)]

    for step in range(1, 7):
        save(tmp_path, step, keep=3)
    assert steps() == [4, 5, 6]
    # Rewound to 2: later checkpoints do not count, and is not deleted behind one's back.
    save(tmp_path, 2, keep=1)
    assert steps() == [2, 4, 5, 6]
    assert load_checkpoint(tmp_path).step == 2
    save(tmp_path, 5, keep=1)
    assert steps() == [5, 6]
    save(tmp_path, 100_000_000, keep=2)
    assert steps() == [6, 100_000_000]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    save(tmp_path, 1, state={"again": True}, samples={"x": torch.ones(1)})
    save(tmp_path, 1, state={"again": True})
    checkpoint = load_checkpoint(tmp_path)
    assert checkpoint.state == {"again": True} and checkpoint.samples is None
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["latest", "step_00000001"]


def test_a_replacement_killed_half_way_loses_nothing(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    path.rename(path.with_name(".old-step_00000001"))  # as after a kill between two renames
    assert load_checkpoint(tmp_path).step == 1
    save(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001", "step_00000002"]
    path.with_name(".old-step_00000001").mkdir()  # as after a kill before the last deletion
    save(tmp_path, 3)
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


def test_leftovers_of_killed_writers_are_swept(tmp_path: Path) -> None:
    checkpoints = save(tmp_path, 1).parent
    for name in (".tmp-00000009-1", ".trash-step_00000000-1"):
        (checkpoints / name).mkdir()
        (checkpoints / name / "model.safetensors").write_bytes(b"half")
    (checkpoints / ".latest-1").symlink_to("nowhere")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_00000001"]
    save(tmp_path, 2)
    assert sorted(os.listdir(checkpoints)) == ["latest", "step_00000001", "step_00000002"]


def test_no_flipped_bit_goes_unnoticed(tmp_path: Path) -> None:
    path = save(tmp_path, 2)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for at in range(len(content)):
            damage(file, at)
            if file.suffix == ".safetensors" or not chr(content[at]).isspace():
                with pytest.raises(UniRLError, match=r"state\.json|format|" + file.name):
                    load_checkpoint(tmp_path)
            file.write_bytes(content)
    assert load_checkpoint(tmp_path).step == 2


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["truncated", "flipped", "missing", "empty"])
def test_a_damaged_file_is_named_with_the_checkpoint_to_use(
    tmp_path: Path, name: str, how: str
) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    damage(tmp_path / "checkpoints/step_00000002/model.safetensors", -1)  # not the good one
    file = tmp_path / "checkpoints/step_00000003" / name
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 2)
    elif how == "empty":
        os.truncate(file, 0)
    elif how == "flipped":
        damage(file, 60)
    else:
        file.unlink()
    with pytest.raises(UniRLError) as caught:
        load_checkpoint(tmp_path / "checkpoints/step_00000003")
    what, rule, remedy = caught.value.parts
    assert str(file) in what
    assert name == "state.json" or ("expected" in rule and "found" in rule)
    assert remedy.endswith(f"use the previous good checkpoint: {list_checkpoints(tmp_path)[0]}")


def test_a_damaged_only_checkpoint_says_so(tmp_path: Path) -> None:
    damage(save(tmp_path, 1) / "model.safetensors", -1)
    with pytest.raises(UniRLError, match=r"expected sha256 .* found .* no other good checkpoint"):
        load_checkpoint(tmp_path)


def test_where_there_is_no_checkpoint_the_error_says_what_was_found(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and list_checkpoints(tmp_path) == []
    for where in (tmp_path, tmp_path / "nowhere", tmp_path / "checkpoints/step_00000001"):
        with pytest.raises(UniRLError) as caught:
            load_checkpoint(where)
        assert len(caught.value.parts) == 3 and str(where) in str(caught.value)


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    file = save(tmp_path, 1) / "state.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(UniRLError, match=r"format 2.*reads format 1.*update"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"optimizer": {"state": {0: torch.ones(1)}}},
            r"optimizer/state/0: it is a key of type int",
        ),
        ({"optimizer": {"betas": (0.9, 0.999)}}, "optimizer/betas: it is a tuple"),
        ({"model": {"x": torch.ones(2).to_sparse()}}, "model/x: it is a torch.sparse"),
        ({"model": {"x": torch.ones(2, device="meta")}}, "on meta"),
        ({"model": {"x": torch.ones(2, dtype=torch.complex128)}}, "complex128"),
        ({"state": {"versions": {3: 1}}}, r"state/versions\[3\] has a key of type int"),
        ({"state": {"rng": [(1, 2)]}}, r"state/rng\[0\] is a tuple"),
        ({"state": {"x": torch.ones(1)}}, "state/x is a Tensor"),
        ({"keep": 0}, "keep >= 1"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_the_disk_is_touched(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UniRLError, match=message) as caught:
        save(tmp_path, 1, **changes)
    assert len(caught.value.parts) == 3
    assert not os.listdir(tmp_path)


def test_a_folder_that_cannot_be_written_is_an_error_a_person_can_act_on(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    with pytest.raises(UniRLError) as caught:
        save(tmp_path, 1)
    assert len(caught.value.parts) == 3 and "checkpoints" in caught.value.what


@pytest.mark.gpu
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    model = {
        "x": torch.randn(4, 3, device="cuda").T,
        "half": torch.ones(2, device="cuda").bfloat16(),
    }
    save(tmp_path, 1, model=model)
    for name, tensor in load_checkpoint(tmp_path).model.items():
        assert tensor.device.type == "cpu" and torch.equal(tensor, model[name].cpu())
