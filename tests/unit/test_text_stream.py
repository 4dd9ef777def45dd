"""Text as it streams: whole characters, nothing of a stop string, the same text as decoding at once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopkv import reference
from loopkv.engine.text_stream import TextStream
from loopkv.models import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(reference.model_folder())


def stream(tokenizer, ids, stop=(), prompt=()):
    """Pieces as they come, and the stream."""
    reader = TextStream(tokenizer, prompt, stop)
    pieces = []
    for token in ids:
        pieces.append(reader.push(token))
        if reader.stopped:
            break
    else:
        pieces.append(reader.finish())
    assert "".join(pieces) == reader.text
    return pieces, reader


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_the_pieces_of_any_text_add_up(tokenizer, text):
    ids = tokenizer(text).input_ids
    pieces, reader = stream(tokenizer, ids)
    assert reader.text == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab.\n", max_size=30), stop=st.lists(st.text("ab.\n", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_stop_string_that_is_complete_first_and_never_shows_a_part_of_it(tokenizer, text, stop):
    pieces, reader = stream(tokenizer, tokenizer(text).input_ids, stop)
    ends = [(at + len(s), at) for s in stop if (at := text.find(s)) >= 0]
    cut = min(ends)[1] if ends else len(text)
    assert reader.text == text[:cut]
    assert reader.stopped == bool(ends)
    shown = ""
    for piece in pieces:
        shown += piece
        assert text[:cut].startswith(shown)


def test_a_character_of_several_tokens_comes_whole(tokenizer):
    ids = tokenizer("a☃b").input_ids
    assert len(ids) > 3  # the snowman has no token of its own
    pieces, _ = stream(tokenizer, ids)
    assert [piece for piece in pieces if piece] == ["a", "☃", "b"]
    pieces, reader = stream(tokenizer, ids[:2])  # cut inside the character: its bytes are shown as what they are
    assert reader.text == tokenizer.decode(ids[:2])


def test_a_held_back_beginning_of_a_stop_string_is_released_at_the_end(tokenizer):
    pieces, reader = stream(tokenizer, tokenizer("one\n").input_ids, stop=("\n\n",))
    assert reader.text == "one\n" and pieces[-1] == "\n"


def test_the_prompt_before_the_text_is_not_repeated(tokenizer):
    prompt = tokenizer("In the beginning ☃").input_ids
    _, reader = stream(tokenizer, tokenizer(" God").input_ids, prompt=prompt)
    assert reader.text == " God"
    _, reader = stream(tokenizer, tokenizer(" God").input_ids, prompt=prompt[:-1])  # a prompt cut inside a character
    assert reader.text.endswith("God")
