"""Cleaning: what is kept, what is dropped."""

from training.clean import COPYLEFT, filter_lines, html_to_text, normalise, osis_to_text, sentences, shingles
from training.corpus import BUNDLE_CHARS, MAX_BUNDLE_CHARS, bundle, split


def test_html_keeps_text_and_pre_and_drops_navigation() -> None:
    page = (
        "<html><head><title>no</title></head><body><div class='related'><div>nav</div> more</div>"
        "<p>One &amp; two\n three.</p><pre>a = 1\n  b = 2</pre><script>x()</script><table><tr><td>k</td><td>v</td></tr>"
        "</table></body></html>"
    )
    text = normalise(html_to_text(page))
    assert text.split("\n") == ["One & two three.", "", "a = 1", "  b = 2", "", " k v"]


def test_html_survives_unclosed_paragraphs() -> None:
    assert normalise(html_to_text("<body><p>first<p>second<ul><li>third")).split() == ["first", "second", "third"]


def test_osis_drops_notes_and_marks() -> None:
    verse = '<title type="x-s">Luke</title>Since <w lemma="G1">many</w> tried<note>a note</note> , it <p/>is &amp;'
    assert normalise(osis_to_text(verse)) == "Luke\nSince many tried, it\nis &"


def test_normalise_typography() -> None:
    assert normalise("\u201cIt\u2019s\u201d \u2014 a\u00a0b  c \n\n\n\nd") == '"It\'s" -- a b c\n\nd'


def test_filter_lines_drops_repeats_and_symbols_once_seen() -> None:
    seen: set[int] = set()
    long = "This sentence is long enough that a second copy of it must be dropped."
    assert filter_lines(long, seen) == long
    assert filter_lines(f"{long}\nshort\nshort\n--- === +++ *** 123 456 789", seen) == "short\nshort"


def test_copyleft_documents_match() -> None:
    assert COPYLEFT.search("licensed under the GNU General Public License, version 2")
    assert COPYLEFT.search("this is under the GPLv3")
    assert COPYLEFT.search("a CC-BY-SA text")
    assert not COPYLEFT.search("released under the MIT license by GPLX Corp")


def test_shingles_find_a_shared_passage() -> None:
    passage = "one two three four five six seven eight nine ten"
    assert not shingles(passage).isdisjoint(shingles("zero " + passage.upper() + ", eleven"))
    assert shingles("one two three") == set()


def test_sentences_have_a_readable_length() -> None:
    text = "Short. This one is long enough to be kept as a sentence. And so is this one, which follows it!"
    assert sentences(text) == [
        "This one is long enough to be kept as a sentence.",
        "And so is this one, which follows it!",
    ]


def test_bundles_keep_every_line_and_respect_the_limits() -> None:
    texts = [f"document {i}\n" + "x" * 3000 for i in range(20)] + ["\n".join("y" * 100 for _ in range(1200))]
    bundles = list(bundle(texts))
    assert all(len(b) <= MAX_BUNDLE_CHARS + BUNDLE_CHARS for b in bundles)
    kept = "\n".join(bundles)
    assert kept.count("document") == 20
    assert kept.count("y" * 100) == 1200


def test_split_is_disjoint_and_does_not_depend_on_order() -> None:
    texts = [f"text {i}" for i in range(100)]
    train, held = split(texts, 0.1)
    assert len(held) == 10
    assert set(train) | set(held) == set(texts)
    assert set(split(texts[::-1], 0.1)[1]) == set(held)
