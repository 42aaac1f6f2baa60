"""Rows too long for a mask of all queries and keys: the same numbers, in bounded memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.llm.packed_groups import make_groups, make_model
from tests.llm.test_packed_attention import BATCH, KINDS, assert_same, packed
from unirl.llm.training.packed_attention import Packing, packed_attention
from unirl.llm.training.packed_kernels import causal_behind_prompts
from unirl.llm.training.packed_layout import PackLayout, Row, lay_out

pytest.importorskip("transformers", reason="needs transformers models")


def attend(layout: PackLayout, states: Tensor, groups: int = 1) -> tuple[Tensor, Tensor]:
    """Packed attention of queries, keys and values [3, H, N, D], and a gradient of it. groups:
    heads of queries that share one of keys and values.
    """
    states = states.clone().requires_grad_()
    module = torch.nn.Module()
    module.is_causal = True  # type: ignore[assignment]
    q, k, v = states[:, None].unbind(0)
    k, v = k[:, ::groups], v[:, ::groups]
    out, _ = packed_attention(module, q, k, v, None, unirl_packing=Packing(layout))
    out.float().square().sum().backward()
    assert states.grad is not None
    return out.detach(), states.grad


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cost", [0, 10**9], ids=["many blocks", "one block"])
def test_long_rows_get_what_a_mask_gives(
    kind: str, cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, groups = make_model(kind.split()[0], **KINDS[kind]), make_groups(*BATCH)
    mask = torch.cat([group.mask for group in groups])
    expected = packed(model, groups)
    monkeypatch.setattr("unirl.llm.training.packed_layout.CALL_COST", cost)
    for module in ("packed_layout", "packed_kernels"):
        monkeypatch.setattr(f"unirl.llm.training.{module}.MASK_CELLS", 0)
    assert_same(packed(model, groups), expected, mask, 1e-12)


def test_in_bfloat16_they_differ_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    layout, order = lay_out([Row(30), Row(20, 0), Row(9, 0), Row(5), Row(20, 3)])
    num = sum((30, 20, 9, 5, 20))
    assert len(order) == 5
    states = torch.randn(3, 4, num, 8, generator=torch.Generator().manual_seed(0))
    exact = attend(layout, states)
    monkeypatch.setattr("unirl.llm.training.packed_kernels.MASK_CELLS", 0)
    for found, wanted in zip(attend(layout, states.bfloat16()), exact, strict=True):
        torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.1)


def test_memory_grows_with_the_tokens_and_not_with_their_square() -> None:
    """A mask of these rows has 50 million cells, 200 MB."""
    torch.set_num_threads(1)
    layout, _ = lay_out([Row(8192), *[Row(4096, 0)] * 6])
    assert layout.blocks[-1].mask_cells > 5e7
    states = torch.randn(3, 1, 32768, 16)
    attend(lay_out([Row(8), Row(8, 0)])[0], states[:, :, :16])  # what is loaded once
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    reset.write_text("5")  # VmHWM begins again from here
    before = kilobytes(status, "VmHWM")
    out, _ = attend(layout, states)
    grown_mb = (kilobytes(status, "VmHWM") - before) / 1000
    assert out.shape == (1, 32768, 1, 16)
    assert grown_mb < 100, "queries, keys, values and their gradients take 6 MB"


def kilobytes(status: Path, name: str) -> int:
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float64),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float32, marks=pytest.mark.gpu),
    ],
    ids=str,
)
def test_the_last_query_sees_the_last_key(device: str, dtype: torch.dtype) -> None:
    """What CUDA computes without a mask."""
    q, k, v = (
        torch.randn(3, 4, num, 16, dtype=torch.float64, requires_grad=True) for num in (7, 19, 19)
    )
    seen = torch.arange(19) <= torch.arange(7)[:, None] + 12
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    given = [each.detach().to(device, dtype).requires_grad_() for each in (q, k, v)]
    attention = partial(F.scaled_dot_product_attention, dropout_p=0.0, scale=None, enable_gqa=False)
    found = causal_behind_prompts(attention, *given)
    for each in (wanted, found):
        each.sum().backward()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype]
    torch.testing.assert_close(found.cpu().double(), wanted, rtol=0, atol=tolerance)
    for one, other in zip(given, (q, k, v), strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.cpu().double(), other.grad, rtol=0, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_gpu_agrees_and_makes_no_mask(dtype: torch.dtype, groups: int) -> None:
    rows = [Row(300), *[Row(length, 0) for length in (200, 200, 90)], Row(50), Row(200, 4)]
    layout, _ = lay_out(rows)
    num = sum(row.length for row in rows)
    states = torch.randn(3, 4, num, 16, generator=torch.Generator().manual_seed(0))
    wanted = attend(layout, states, groups)
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-3
    there = attend(layout.to("cuda"), states.to("cuda", dtype), groups)
    for found, exact in zip(there, wanted, strict=True):
        torch.testing.assert_close(found.cpu().float(), exact, rtol=tolerance, atol=tolerance)
    layout, _ = lay_out([Row(16384), *[Row(4096, 0)] * 4])
    states = torch.randn(3, groups, 32768, 16, device="cuda", dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attend(layout.to("cuda"), states, groups)
    assert torch.cuda.max_memory_allocated() - before < 150e6
