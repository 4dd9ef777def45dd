"""How answers are scored and which items there are."""

import pytest

from loopkv.errors import LoopKVError
from loopkv.eval.task_items import TASK_GROUPS, TaskItem, reference_items, score_answer


@pytest.mark.parametrize(
    ("kind", "answer", "text", "score"),
    [
        ("exact", " 8527637\n", " 8527637", 1.0),
        ("exact", " 8527637\n", "8527637 \nmore", 1.0),
        ("exact", " 8527637\n", " 8527638", 0.0),
        ("exact", " 8527637\n", "", 0.0),
        ("exact", " 8527637\n", "\n 8527637", 0.0),  # only the first line counts
        ("final", " 5 + 6 = 11 -> 0; Answer: 1\n", " 4 + 7 = 11 -> 0; Answer: 1", 1.0),
        ("final", " Answer: 1\n", " Answer: 11", 0.0),
        ("final", " Answer: -3\n", " Answer:-3.", 1.0),
        ("final", " Answer: 1\n", " 1", 0.0),
        ("set", " 39323, 14863, 58656, 41868\n", " 41868, 39323, 58656, 14863", 1.0),
        ("set", " 39323, 14863, 58656, 41868\n", " 41868, 99999, 58656", 0.5),
        ("set", " PGK, ACM\n", " PGK, PGK, PGK", 0.5),
        ("set", " deed: 98161, earlier: 64861\n", " deed: 98161, earlier: 98161", 0.5),
        ("set", " PGK\n", "", 0.0),
    ],
)
def test_scores(kind, answer, text, score):
    assert score_answer(TaskItem("id", "task", 1000, "prompt", answer, kind), text) == score


def test_the_right_answer_of_every_item_scores_one():
    items = reference_items(lengths=(1000, 1900))
    assert len({item.id for item in items}) == len(items)
    for item in items:
        assert score_answer(item, item.answer) == 1.0
        assert item.answer.endswith("\n") and "\n" not in item.answer[:-1]


def test_every_group_has_a_hundred_items():
    items = reference_items()
    assert {item.length for item in items} == {1000}
    for group in TASK_GROUPS.values():
        assert sum(item.task in group for item in items) >= 100


def test_choosing_items():
    few = reference_items(["kv_dict", "arith"], (1900,), 3)
    assert [(item.task, item.length) for item in few] == [("kv_dict", 1900)] * 3 + [("arith", 1900)] * 3
    for arguments, words in (
        ({"tasks": ["kv_dictionary"]}, "kv_dictionary"),
        ({"lengths": (1500,)}, "1500.*1000, 1900"),
        ({"items_per_task": 0}, "none"),
    ):
        with pytest.raises(LoopKVError, match=words):
            reference_items(**arguments)
