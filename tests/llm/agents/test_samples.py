"""Episodes as samples: what is trained is what was drawn, each token once, and the gradient is
exact.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="language models need the extra llm")

from tests.llm.packed_groups import make_model
from tests.llm.test_learner import make_learner
from unirl.core.sample import Batch, Slot
from unirl.core.tree import flatten
from unirl.llm.agents.episode import ROOT, Episode, Turn
from unirl.llm.agents.sample import write_episodes
from unirl.llm.algorithms.config import AlgorithmConfig
from unirl.llm.algorithms.resolve import resolve
from unirl.llm.algorithms.turn_credit import TurnCredit, Turns, turn_advantages
from unirl.llm.engine import NOBODY, Completion
from unirl.llm.group import Group, GroupShape, read_group
from unirl.llm.outcome import Score

PROMPT = (5, 6, 7)


def turn(parent: int, given: Sequence[int], drawn: Sequence[int], **rest: Any) -> Turn:
    count = len(drawn)
    logp = tuple(-float(token) for token in drawn)
    return Turn(parent, tuple(given), Completion(tuple(drawn), logp, (3,) * count, "stop"), **rest)


def random_episode(seed: int) -> Episode:
    """A tree of turns with forks, roots of their own and turns that are not trained. Each drawn
    token is a number of its own.
    """
    draw, number = random.Random(seed), itertools.count(100)
    episode = Episode()
    for i in range(draw.randint(1, 8)):
        parent = draw.randint(-1, i - 1) if i else ROOT
        given = [draw.randint(8, 20) for _ in range(draw.randint(1, 3))]
        if parent == ROOT and draw.random() < 0.6:
            given = [*PROMPT, *given] if draw.random() < 0.5 else [*PROMPT]
        drawn = [next(number) for _ in range(draw.randint(0, 4))]
        episode.turns.append(
            turn(parent, given, drawn, trained=draw.random() < 0.9, reward=float(i))
        )
    return episode


@pytest.mark.parametrize("seed", range(30))
def test_each_drawn_token_is_trained_once_and_nothing_else_is(seed: int) -> None:
    episode = random_episode(seed)
    segments = episode.segments(PROMPT)
    trained = Counter(
        token
        for segment in segments
        for token, mask in zip(segment.token, segment.mask, strict=True)
        if mask
    )
    wanted = [token for each in episode.turns if each.trained for token in each.completion.tokens]
    on_paths = {number for leaf in episode.leaves for number in episode.path(leaf)}
    assert on_paths == set(range(len(episode.turns)))
    assert trained == Counter(wanted)


@pytest.mark.parametrize("seed", range(30))
def test_a_slot_gives_back_the_paths_that_were_written(seed: int) -> None:
    episodes = [random_episode(10 * seed + i) for i in range(3)]
    group = group_of(episodes, [[Score(1.0)]] * 3, max_tokens=200, max_segments=8)
    assert tuple(group.prompt.tolist()) == PROMPT
    segments = [(i, each) for i, one in enumerate(episodes) for each in one.segments(PROMPT)]
    assert group.owner.tolist() == [i for i, _ in segments]
    for c, (begin, end) in enumerate(itertools.pairwise(group.starts.tolist())):
        _, segment = segments[c]
        for name in ("token", "mask", "version", "turn"):
            assert tuple(getattr(group, name)[begin:end].tolist()) == getattr(segment, name)
        assert group.logp[begin:end].tolist() == pytest.approx(segment.logp)
        assert bool(group.shared[c]) == segment.is_shared  # type: ignore[index]


def test_what_does_not_fit_a_slot_is_left_out_whole_and_counted() -> None:
    episode = Episode([turn(ROOT, PROMPT, (100, 101)), turn(ROOT, (9, 9), (102,))])
    for max_tokens, max_segments in ((200, 1), (4, 8)):
        group = group_of([episode], [[Score(1.0)]], max_tokens, max_segments)
        assert group.token[group.mask].tolist() == [100, 101]
        assert group.counts is not None and float(group.counts.sum()) == 1.0


def test_what_a_dropped_path_would_have_trained_is_trained_in_the_next() -> None:
    """Turn 1 is on two paths, of which the first is too long."""
    episode = Episode(
        [
            turn(ROOT, PROMPT, (100,)),
            turn(0, (9,), (101,)),
            turn(1, (9,) * 20, (102,)),
            turn(1, (9,), (103,)),
        ]
    )
    group = group_of([episode], [[Score(1.0)]], 12, 8)
    assert group.token[group.mask].tolist() == [100, 101, 103]


# An enumerable world: two turns of one token each, what is given between them depends on the first,
# and a sub-agent with a prompt of its own draws a third.
VOCABULARY = 3
SUB_PROMPT = (2, 0)


def world() -> list[tuple[Episode, float, tuple[float, float, float]]]:
    """Every episode, its outcome and its step rewards."""
    draw, found = random.Random(4), []
    # A step is paid for what was drawn until then.
    paid: defaultdict[tuple[int, ...], float] = defaultdict(lambda: draw.uniform(-1, 1))
    for a, b, c in itertools.product(range(VOCABULARY), repeat=3):
        steps = (paid[a,], paid[a, b], paid[a, b, c])
        outcome = draw.uniform(-1, 1)
        given = ((a + 1) % VOCABULARY, 1)
        episode = Episode(
            [
                turn(ROOT, (0, 1), (a,)),
                turn(0, given, (b,)),
                turn(ROOT, SUB_PROMPT, (c,), origin="rewritten"),
            ]
        )
        found.append((episode, outcome, steps))
    return found


def test_the_expected_gradient_is_that_of_what_episodes_earn() -> None:
    """With outcomes, with step rewards (each turn gets what comes from it on, or each token), and
    with both.
    """
    plain = AlgorithmConfig(
        advantage="group", baseline="none", scale="none", objective="reinforce",
        aggregation="seq-mean-token-sum", correction="none",
    )  # fmt: skip
    by_token = TurnCredit("turn", compare="token")
    for credit in (None, TurnCredit("turn"), by_token, TurnCredit("both")):
        model = make_model(vocab_size=VOCABULARY).requires_grad_(True)
        chance = [episode_logp(model, episode).exp() for episode, _, _ in world()]
        assert float(torch.stack(chance).detach().sum()) == pytest.approx(1.0)
        goal: Tensor = torch.zeros(())
        for probability, (_, outcome, steps) in zip(chance, world(), strict=True):
            paid = sum(steps) if credit is not None else 0.0
            counts = credit is None or credit.kind == "both"
            goal = goal + probability * (paid + (outcome if counts else 0.0))
        exact = dict(
            zip(
                [name for name, _ in model.named_parameters()],
                torch.autograd.grad(goal, list(model.parameters())),
                strict=True,
            )
        )
        groups = []
        for probability, (episode, outcome, steps) in zip(chance, world(), strict=True):
            # Each episode counts by its probability: the batch is the expectation.
            factor = float(probability.detach()) * len(chance)
            turns = [
                turn(each.parent, each.given, each.completion.tokens, reward=factor * step)
                for each, step in zip(episode.turns, steps, strict=True)
            ]
            score = [[Score(factor * outcome)]]
            groups.append(group_of([Episode(turns)], score, 16, 2, prompt=(0, 1)))
        learner = make_learner(plain, model=model, credit=credit, skip_zero=False)
        before = {n: v.clone() for n, v in flatten(learner.state_dict().model).items()}
        learner.step(batch_of(groups))
        after = flatten(learner.state_dict().model)
        scale = max(float(value.abs().max()) for value in exact.values())
        matched = 0
        for name, value in exact.items():
            [key] = [each for each in before if each.endswith(name)]
            moved = after[key] - before[key]  # a step of size 1 up the expected reward
            assert (moved - value).abs().max() <= 1e-5 * scale, (credit, name)
            matched += 1
        assert matched == len(exact) and scale > 1e-4


def test_turns_are_compared_with_those_that_were_given_the_same() -> None:
    """Against the formula, written out: GiGPO's step groups within a group, returns discounted."""
    draw = random.Random(1)
    groups, rows = [], []
    for g in range(3):
        episodes = []
        for _ in range(4):
            states = [draw.choice(((8,), (9,), (8, 9))) for _ in range(draw.randint(1, 3))]
            rewards = [draw.choice((0.0, 1.0, 0.5)) for _ in states]
            turns = [
                turn(k - 1, PROMPT if k == 0 else states[k], (50 + k,), reward=rewards[k])
                for k in range(len(states))
            ]
            episodes.append(Episode(turns))
            for k in range(len(states)):
                to_come = sum(0.9 ** (j - k) * rewards[j] for j in range(k, len(states)))
                rows.append((g, () if k == 0 else states[k], to_come))
        groups.append(group_of(episodes, [[Score(0.0)]] * 4, 40, 1))
    algorithm = resolve(AlgorithmConfig(baseline="mean", scale="none"), max_tokens=16)
    found = turn_advantages(
        algorithm, TurnCredit("turn", 0.9), Turns.of(groups, "state"), torch.ones(12)
    )
    drawn = torch.cat([one.mask for one in groups])
    slow = []
    for group, state, to_come in rows:
        peers = [each for g, s, each in rows if (g, s) == (group, state)]
        slow.append(to_come - sum(peers) / len(peers) if len(peers) > 1 else 0.0)
    assert found[drawn].tolist() == pytest.approx(slow, abs=1e-12)
    assert not found[~drawn].any()
    assert any(abs(each) > 0.1 for each in slow)


def test_tokens_are_compared_in_their_group_and_with_all_where_it_earns_the_same() -> None:
    draw = random.Random(2)
    groups, rows = [], []
    for g in range(3):
        episodes = []
        for _ in range(4):
            episode = Episode()
            for k in range(draw.randint(1, 2)):
                paid = tuple(draw.choice((0.0, 0.25, 1.0)) for _ in range(draw.randint(1, 3)))
                drawn = range(50, 50 + len(paid))
                given, total = ((8,), 0.5 + sum(paid)) if k else (PROMPT, sum(paid))
                episode.turns.append(turn(k - 1, given, drawn, reward=total, token_rewards=paid))
                # What a turn earns besides stands at its last token.
                behind = paid[-1] + (0.5 if k else 0.0)
                rows += [((g, k, i), one) for i, one in enumerate((*paid[:-1], behind))]
            episodes.append(episode)
        groups.append(group_of(episodes, [[Score(0.0)]] * 4, 40, 1))
    algorithm = resolve(AlgorithmConfig(baseline="mean", scale="none"), max_tokens=16)
    credit = TurnCredit("turn", 0.0, "token")
    found = turn_advantages(algorithm, credit, Turns.of(groups, "token"), torch.ones(12))
    slow = []
    for key, reward in rows:
        peers = [each for other, each in rows if other == key]
        if len(set(peers)) == 1:
            peers = [each for other, each in rows if other[1:] == key[1:]]
        slow.append(reward - sum(peers) / len(peers) if len(peers) > 1 else 0.0)
    drawn_here = torch.cat([one.mask for one in groups])
    assert found[drawn_here].tolist() == pytest.approx(slow, abs=1e-6)
    assert not found[~drawn_here].any() and any(abs(each) > 0.1 for each in slow)


def episode_logp(model: Any, episode: Episode, temperature: float = 0.7) -> Tensor:
    """Of everything that it drew, one token after the other."""
    total = torch.zeros((), dtype=torch.float64)
    for number, each in enumerate(episode.turns):
        tokens, count = episode.tokens(number), len(each.completion.tokens)
        logits = model(torch.tensor([tokens])).logits[0] / temperature
        for place in range(len(tokens) - count, len(tokens)):
            total = total + logits[place - 1].log_softmax(-1)[tokens[place]]
    return total


def group_of(
    episodes: Sequence[Episode],
    scores: Sequence[Sequence[Score]],
    max_tokens: int,
    max_segments: int,
    prompt: Sequence[int] = PROMPT,
) -> Group:
    shape = GroupShape(len(episodes), len(prompt), max_tokens, 1, max_segments)
    data = shape.spec().allocate()
    write_episodes(data, prompt, episodes, scores, shape, {})
    assert int(data["version"].min()) >= NOBODY
    return read_group(data)


def batch_of(groups: Sequence[Group]) -> Batch:
    slots = []
    for i, one in enumerate(groups):
        shape = GroupShape(one.size, one.prompt.numel(), 16, 1, 2)
        data = shape.spec().allocate()
        begin, end = one.prompt.numel(), one.prompt.numel() + one.token.numel()
        data["token"][:begin] = one.prompt
        for name in ("token", "logp", "mask", "version", "turn", "step_reward"):
            data[name][begin:end] = getattr(one, name)
        data["starts"].fill_(end)
        data["starts"][: one.starts.numel()] = one.starts + begin
        data["episode"].fill_(-1)
        data["episode"][: one.owner.numel()] = one.owner
        data["shared"][: one.owner.numel()] = one.shared
        for name in ("finish", "reward", "outcome", "ending", "counts"):
            data[name].copy_(getattr(one, name))
        slots.append(Slot(i, i, data, 0, 0, 0))
    return Batch(slots, 0)
