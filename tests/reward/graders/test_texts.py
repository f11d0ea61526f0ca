"""Tests which answers count as the same: those that differ in form only."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.graders.texts import blocks, normalize

SAME = [
    ("The Beatles!", "beatles", " Beatles.", '"The Beatles"', "**Beatles**", "\u201cBeatles\u201d", "(Beatles)"),
    ("U.S.", "US", "u.s"),
    ("1,000", "1000", "1000.", "\uff11\uff10\uff10\uff10"),
    ("A", "a", "A.", "(A)", "a)", "[A]", "**A**", "`A`"),
    ("-5", "\u22125", "\u20135", "-5."),
    ("50%", "50 %"),
    ("$x$", "x"),
    ("don't", "dont", "don\u2019t"),
    ("well-known", "wellknown"),
    ("COVID-19", "covid19"),
    ("Paris (France)", "Paris, France", "paris france"),
    ("Once Upon a Time", "Once upon A time"),
    ("5 p.m.", "5 pm"),
    ("caf\u00e9", "cafe\u0301"),
    ("\u5317\u4eac\u3002", "\u5317\u4eac"),
    ("A, C", "A,C", "a,c."),
    ("(1,2)", "(1, 2)"),
    ("1,2,3", "1, 2, 3"),
    ("January 5, 2020", "January 5,2020"),
    ("x = 1", "x=1"),
    ("20 \u00b0C", "20\u00b0C"),
    ("A", "A\u200b", "\ufeffA"),
    ("Hello (world) - foo", "hello world foo"),
    ("Apple (AAPL) - Tech", "Apple AAPL Tech"),
    ("rock(s) - music", "rocks music"),
]
DIFFERENT = """
A | B | AB | The | The The | An | A, B | A and B | and B | A+ | A- | A* | Plan A | Plan | Vitamin C | Vitamin
-5 | 5 | 35 | 3.5 | 3,5 | 3-5 | 3:5 | 3/5 | 3^5 | .5 | 5! | 5' | 50% | 50 | $5 | \u20ac5 | <5 | >5 | ~5 | 1.5.2 | 15.2 | 1e5 | 1e-5
C | C++ | C# | F# | F | \u00bd | 1/2 | 12 | 1 2 | x | -x | x-1 | x+1 | x1 | x=1 | n | n! | x^2 | x\u00b2 | x2 | f(2) | f2 | 2(3) | 23
-\u221e | \u221e | -\u221a2 | \u221a2 | -\u20ac10 | \u20ac10 | -(x+1) | x/10 | x10 | A, C | AC
(0,1) | [0,1] | [0,1) | (0,1] | = | % | + | - | ? | ! | * | / | ... | # | & | @ | snake_case | snakecase | a & b | a | \u3002
sin(x)+1 | sin(x+1) | sin(x)-cos(x) | sin(x)cos(x) | log(x)/2 | log(x/2) | log(x)*2 | (x+1)/(x-1) | x+1/x-1 | (x+1)(x-1)
2/(x+1) | 2(x+1) | 2/x+1 | x-(y+1) | x-y+1 | x(y+1) | exp(-x) | exp(x)
"""  # noqa: E501


@pytest.mark.parametrize("texts", SAME)
def test_forms_of_one_answer_are_the_same(texts: tuple[str, ...]) -> None:
    assert len({normalize(text) for text in texts}) == 1, [normalize(text) for text in texts]


def test_different_answers_differ() -> None:
    answers = list(dict.fromkeys(text.strip() for text in DIFFERENT.replace("\n", "|").split("|") if text.strip()))
    answers.remove("a")  # the same as A
    pairs = itertools.combinations(answers, 2)
    assert [pair for pair in pairs if normalize(pair[0]) == normalize(pair[1])] == []


@given(st.text(alphabet="aAthe \t\n-+.,/%$#*!?\"'()[]_`0123\u00bd\u3002\uff0d\u200b"))
def test_no_visible_answer_becomes_empty(text: str) -> None:
    assert bool(normalize(text)) == bool(text.split())
    assert normalize(f" {text}\n") == normalize(text)


NUMBERS = st.integers(-(10**6), 10**6) | st.decimals(-1000, 1000, places=3)


@given(NUMBERS, NUMBERS, st.sampled_from(["{}", "{}.", "{:,}", "**{}**", "({})", "The {}, "]))
def test_numbers_are_the_same_only_if_they_are_written_alike(one: object, other: object, form: str) -> None:
    assert normalize(form.format(one)) == normalize(str(one))
    assert (normalize(form.format(one)) == normalize(str(other))) == (str(one) == str(other))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["(,", "1,", "**a*", '"', "_ ", "((1,", "a ", "-", "x-"])
def test_a_long_text_takes_little_time(piece: str) -> None:
    assert normalize(piece * 20_000)


def test_blocks_are_found_in_linear_time() -> None:
    """With thousands of blocks, as a policy that repeats itself writes, a quadratic search takes minutes."""
    for program in ("x = 1\n", "x = 'a'  # it's\n", '"""a\n```\nb\n```\n"""\n'):
        assert list(blocks(f"```python\n{program}```\n" * 20_000)) == [("python", program)] * 20_000


def test_the_search_goes_on_behind_a_block_even_if_its_end_was_sought_farther() -> None:
    text = "```python\n    ```\nx = 1\n" + '"""a\n```\nb\n```\n"""\n'
    assert [content for _, content in blocks(text)] == ["", "b\n"]
