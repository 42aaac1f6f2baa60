"""Forward and backward of a language model over groups of completions: packs with shared prompts
against the padded rows of plain transformers, side by side in one process.

    python benchmarks/packed_forward.py --new 16 48

The model has SmolLM2-135M's size and random weights. The padded side is what trainers commonly do:
prompts padded left, completions right, logits of the completions alone, log_softmax row by row.
Both sides compute the same loss, which is printed. Their rounds alternate, so that both meet the
same machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
# The clone this file is in, whatever is installed; off the path again at once, as it has folders
# that other packages would be mistaken for.
sys.path.insert(0, str(ROOT))
from unirl.llm.group import Group  # noqa: E402
from unirl.llm.training.language_policy import LanguagePolicy  # noqa: E402
from unirl.llm.training.packing import Pack, pack_groups  # noqa: E402

sys.path.remove(str(ROOT))

VOCAB = 49152


def make_model(layers: int, dtype: torch.dtype) -> nn.Module:
    """A Llama of SmolLM2-135M's size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=576,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(dtype).train()


def make_groups(options: argparse.Namespace, new: int) -> list[Group]:
    """Groups of random tokens; --spread: completions of new / 4 to new tokens."""
    generator = torch.Generator().manual_seed(1)
    groups = []
    for _ in range(options.groups):
        low = max(1, new // 4) if options.spread else new
        lengths = torch.randint(low, new + 1, (options.completions,), generator=generator)
        num, g = int(lengths.sum()), options.completions
        groups.append(
            Group(
                prompt=torch.randint(VOCAB, (options.prompt,), generator=generator),
                token=torch.randint(VOCAB, (num,), generator=generator),
                logp=torch.zeros(num),
                mask=torch.ones(num, dtype=torch.bool),
                version=torch.zeros(num, dtype=torch.int32),
                starts=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).int(),
                finish=torch.zeros(g, dtype=torch.int8),
                reward=torch.zeros(g, 1),
                outcome=torch.zeros(g, 1, dtype=torch.int8),
            )
        )
    return groups


def packed_step(model: nn.Module, packs: Sequence[Pack], advantage: Tensor) -> float:
    """Loss and gradients through packs; advantage: one per completion of the batch."""
    total = 0.0
    for pack in packs:
        logp = LanguagePolicy(model, temperature=1.0)(pack).logp
        loss = -(logp * advantage[pack.sequence]).mean()
        loss = loss * (pack.num_targets / sum(one.num_targets for one in packs))
        loss.backward()
        total += loss.item()
    return total


def padded_rows(groups: Sequence[Group], rows: int) -> list[tuple[Tensor, ...]]:
    """Micro-batches of so many rows: ids, attention mask, completion mask, number of the rows."""
    longest = max(int(group.lengths.max()) for group in groups)
    prompt = max(group.prompt.numel() for group in groups)
    num = sum(group.size for group in groups)
    ids = torch.zeros(num, prompt + longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    i = 0
    for group in groups:
        for completion in torch.split(group.token, group.lengths.tolist()):
            begin, end = prompt - group.prompt.numel(), prompt + completion.numel()
            ids[i, begin:end] = torch.cat([group.prompt, completion])
            mask[i, begin:end] = 1
            i += 1
    tensors = (ids, mask, mask[:, prompt:], torch.arange(num))
    return list(zip(*(tensor.split(rows) for tensor in tensors), strict=True))


def padded_step(model: nn.Module, batch: Sequence[tuple[Tensor, ...]], advantage: Tensor) -> float:
    """The same loss and gradients through padded rows."""
    total, num = 0.0, sum(int(done.sum()) for _, _, done, _ in batch)
    for ids, mask, done, row in batch:
        new = done.shape[1]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=new + 1,
        ).logits[:, :-1]
        # bfloat16 takes log_softmax row by row, as trainers do for its precision and memory.
        logp = torch.stack(
            [
                one.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1)
                for one, target in zip(logits, ids[:, -new:], strict=True)
            ]
        )
        loss = -(logp * advantage[row][:, None] * done).sum() / num
        loss.backward()
        total += loss.item()
    return total


def seconds(
    step: Callable[[], float], model: nn.Module, clock: Callable[[], float]
) -> tuple[float, float]:
    """How long one step takes by that clock, and its loss."""
    model.zero_grad(set_to_none=True)
    begin = clock()
    loss = step()
    return clock() - begin, loss


def profile(step: Callable[[], float]) -> None:
    """Print where the time goes."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU]) as found:
        step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))


def main() -> None:
    """Measure, and print one line per side and length."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--new", type=int, nargs="+", default=[16, 48], help="new tokens")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--completions", type=int, default=8, help="of each group")
    parser.add_argument("--prompt", type=int, default=40, help="tokens")
    parser.add_argument("--budget", type=int, default=4096, help="input tokens of a pack")
    parser.add_argument("--rows", type=int, default=32, help="of a padded micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--spread", action="store_true", help="completions of different lengths")
    parser.add_argument("--profile", action="store_true", help="of one packed step, then end")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="count CPU seconds, with --threads 1: for a machine that others use too",
    )
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    clock = time.process_time if options.cpu_time else time.perf_counter
    model = make_model(options.layers, getattr(torch, options.dtype))
    unit = "CPU s" if options.cpu_time else "s"
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {options.dtype}", flush=True)
    for new in options.new:
        groups = make_groups(options, new)
        generator = torch.Generator().manual_seed(2)
        advantage = torch.randn(sum(group.size for group in groups), generator=generator)
        begin = time.perf_counter()
        packs = pack_groups(groups, options.budget)
        packing = time.perf_counter() - begin
        rows = padded_rows(groups, options.rows)

        def packed(packs: list[Pack] = packs, advantage: Tensor = advantage) -> float:
            return packed_step(model, packs, advantage)

        def padded(rows: list[tuple[Tensor, ...]] = rows, advantage: Tensor = advantage) -> float:
            return padded_step(model, rows, advantage)

        seconds(packed, model, clock)
        if options.profile:
            profile(packed)
            return
        seconds(padded, model, clock)
        times: list[list[float]] = [[], []]
        losses = [0.0, 0.0]
        for _ in range(options.rounds):
            for side, step in enumerate((packed, padded)):
                taken, losses[side] = seconds(step, model, clock)
                times[side].append(taken)
        tokens = sum(pack.num_targets for pack in packs)
        computed = sum(pack.input_ids.numel() for pack in packs), sum(r[0].numel() for r in rows)
        medians = [statistics.median(one) for one in times]
        for side, name in enumerate(("packed", "padded")):
            print(
                f"{new:4d} new tokens  {name}  {medians[side]:6.2f} {unit}  "
                f"({min(times[side]):.2f}-{max(times[side]):.2f})  "
                f"{tokens / medians[side]:6.0f} trained tokens/s  "
                f"{computed[side]:5d} computed tokens, {computed[side] / medians[side]:5.0f}/s"
                f"  loss {losses[side]:+.5f}"
            )
        print(
            f"{new:4d} new tokens  ratio {medians[1] / medians[0]:.2f}  "
            f"({len(packs)} packs made in {1e3 * packing:.1f} ms)",
            flush=True,
        )


if __name__ == "__main__":
    main()
