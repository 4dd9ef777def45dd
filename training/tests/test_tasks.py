"""Task generator: determinism, answers that follow from the prompt, scoring."""

import random
import re
from itertools import pairwise

import numpy as np
import pytest

from training.data import ANSWER_WEIGHT, Recipe, TextRows, build_batch, encode_item, synthetic_row
from training.tasks import EVAL_LENGTHS, TASKS, Pools, eval_items, score


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_item(task: str, pools: Pools) -> None:
    first, second, other = (TASKS[task](random.Random(seed), pools, 400, 3) for seed in ("a", "a", "b"))
    assert first == second
    assert first != other


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("tokens", [160, 600])
def test_the_answer_scores_one_and_nothing_scores_zero(task: str, tokens: int, pools: Pools) -> None:
    item = TASKS[task](random.Random(task), pools, tokens, 1)
    assert item.answer.startswith(" ") and item.answer.endswith("\n") and "\n" not in item.answer[:-1]
    assert score(item.score, item.answer, item.answer + "more") == 1
    assert score(item.score, item.answer, "") == 0


@pytest.mark.parametrize("task", TASKS)
def test_length_is_near_the_target(task: str, pools: Pools) -> None:
    sizes = [pools.count(TASKS[task](random.Random(i), pools, 1000, 1).prompt) for i in range(8)]
    assert 700 <= sum(sizes) / len(sizes) <= 1050


@pytest.mark.parametrize("task", TASKS)
def test_pieces_encode_as_the_whole(task: str, pools: Pools) -> None:
    item = TASKS[task](random.Random(task), pools, 300, 3)
    ids, weights = encode_item(item, pools)
    whole = item.context + "".join(q + a for q, a in item.turns)
    assert ids == [*pools.tokenizer.encode(whole, add_special_tokens=False).ids, 0]
    answers = [t for t, w in zip(ids, weights, strict=True) if w == ANSWER_WEIGHT]
    assert pools.tokenizer.decode(answers) == "".join(a for _, a in item.turns)


def test_variable_chains_resolve(pools: Pools) -> None:
    for seed in range(20):
        item = TASKS["vt_value"](random.Random(seed), pools, 500, 6)
        source = dict(re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", item.context))
        for question, answer in item.turns:
            if found := re.search(r"value of (\w+)\?", question):
                name = found.group(1)
                while not name.isdigit():
                    name = source[name]
                assert name == answer.strip()
            else:
                value = re.search(r"value (\d+)\?", question).group(1)
                names = answer.strip().split(", ")
                assert source[names[0]] == value
                assert all(source[b] == a for a, b in pairwise(names))


def test_frequent_words_are_the_most_frequent(pools: Pools) -> None:
    item = TASKS["freq_words"](random.Random(1), pools, 600, 1)
    listed = item.context.split("\n")[1].split()
    ranked = sorted(set(listed), key=lambda w: -listed.count(w))[:3]
    assert item.answer.strip().split(", ") == ranked


def test_scores() -> None:
    assert score("exact", " 123\n", " 123\nQuestion") == 1
    assert score("exact", " 123\n", " 1234") == 0
    assert score("set", " a, b, c\n", " c, a") == pytest.approx(2 / 3)
    assert score("final", " 1 + 2 = 3 -> 3; Answer: 3\n", " ...; Answer: 3") == 1
    assert score("final", " 1 + 2 = 3 -> 3; Answer: 3\n", " Answer: 4") == 0
    with pytest.raises(ValueError, match="wanted exact"):
        score("rouge", "a", "a")


def test_evaluation_items_have_unique_ids_and_every_cell(pools: Pools) -> None:
    rows = list(eval_items(pools, count=2))
    assert len({r["id"] for r in rows}) == len(rows) == len(TASKS) * len(EVAL_LENGTHS) * 2
    assert rows == list(eval_items(pools, count=2))


def test_rows_start_with_an_item_and_are_full(pools: Pools) -> None:
    ids, weights = synthetic_row(random.Random(3), pools, 512, 160)
    assert ids.shape == weights.shape == (513,)
    assert (weights == ANSWER_WEIGHT).any()
    assert ids[0] != 0


def test_batches_are_functions_of_seed_and_index(pools: Pools, runs: list[list[str]]) -> None:
    stream = np.array(pools.tokenizer.encode("\n".join(line for run in runs for line in run)).ids, np.uint16)
    recipe = Recipe(batch_tokens=1024, row=128, long_row=256, last_length=128)
    first, second = (build_batch(5, 0.95, recipe, TextRows(stream, 128, 1), pools, 1) for _ in range(2))
    assert first.row == 256
    assert (first.tokens == second.tokens).all() and (first.weights == second.weights).all()
    assert (first.tokens[1:256] == first.labels[:255]).all()


def test_text_rows_visit_every_block_once_an_epoch(pools: Pools) -> None:
    rows = TextRows(np.arange(1000, dtype=np.uint16), 64, seed=1)
    starts = {int(rows[i][0]) for i in range(rows.blocks)}
    assert len(starts) == rows.blocks
    assert all(len(rows[i]) == 65 for i in range(2 * rows.blocks))
