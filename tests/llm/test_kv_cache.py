"""The cache keeps what it is given while it grows and rows move."""

import torch

from unirl.llm.engines.hf.kv_cache import CacheShape, KeyValueCache

SHAPE = CacheShape(layers=2, heads=3, head_size=4)


def _filled(rows: int, positions: int) -> tuple[KeyValueCache, torch.Tensor]:
    cache = KeyValueCache(SHAPE, torch.float32, torch.device("cpu"))
    cache.reserve(rows, positions, used_rows=0, used_positions=0)
    kept = torch.randn(2, 2, rows, 3, positions, 4, generator=torch.Generator().manual_seed(0))
    cache.data[:, :, :rows, :, :positions] = kept
    return cache, kept


def test_growing_keeps_what_rows_hold() -> None:
    cache, kept = _filled(5, 7)
    cache.reserve(9, 500, used_rows=5, used_positions=7)
    assert cache.rows >= 9
    assert cache.positions >= 500
    assert torch.equal(cache.data[:, :, :5, :, :7], kept)
    assert not cache.data[:, :, 5:].any()
    data = cache.data
    cache.reserve(8, 400, used_rows=5, used_positions=7)
    assert cache.data is data


def test_tokens_are_appended_where_each_row_ends() -> None:
    cache, kept = _filled(3, 20)
    length = torch.tensor([4, 19, 0])
    key, value = torch.randn(2, 3, 3, 4).unbind(0)
    cache.append(1, cache.next_cells(length), key.reshape(-1, 4), value.reshape(-1, 4))
    for row, place in enumerate(length.tolist()):
        kept[1, 0, row, :, place] = key[row]
        kept[1, 1, row, :, place] = value[row]
    assert torch.equal(cache.data[:, :, :3, :, :20], kept)


def test_one_prompt_fills_all_rows_that_begin_with_it() -> None:
    cache, kept = _filled(6, 10)
    key, value = torch.randn(2, 2, 3, 5, 4).unbind(0)
    cache.fill(0, 2, torch.tensor([0, 1, 1]), key, value)
    for row, prompt in ((2, 0), (3, 1), (4, 1)):
        kept[0, 0, row, :, :5] = key[prompt]
        kept[0, 1, row, :, :5] = value[prompt]
    assert torch.equal(cache.data[:, :, :6, :, :10], kept)


def test_rows_move_into_gaps() -> None:
    for sources, targets in (([4], [1]), ([3, 5], [0, 2]), ([], [])):
        cache, kept = _filled(6, 10)
        cache.move(sources, targets, 10)
        kept[:, :, targets] = kept[:, :, sources]
        assert torch.equal(cache.data[:, :, :6, :, :10], kept)


def test_cleared_memory_is_given_back_and_can_be_used_again() -> None:
    cache, _ = _filled(6, 10)
    cache.clear()
    assert cache.data.numel() == 0
    cache.reserve(2, 3, used_rows=0, used_positions=0)
    assert not cache.data.any()
