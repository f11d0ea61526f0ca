"""Scorers that need no worker, and the regular expression that does."""

import itertools
import time

import pytest

from services.reward.errors import FailureReason
from services.reward.graders.code import _NUMBER
from services.reward.graders.texts import after_reasoning, blocks, normalize, unindent
from services.reward.scorers.text import _final_number


async def score(open_run, item, **scorer):
    async with open_run(scorer) as run:
        (outcome,) = await run.score([item])
    assert outcome.failure is None
    return outcome.reward


async def test_the_order_of_scorers_does_not_change_a_bit_of_the_reward(open_run, make_item):
    for weights in itertools.permutations((0.7, 0.2, 0.1)):
        scorers = [{"kind": "exact", "name": f"s{weight}", "weight": weight} for weight in weights]
        async with open_run(*scorers) as run:
            right, wrong = await run.score([make_item("42", "42"), make_item("41", "42")])
        assert (right.reward, wrong.reward) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("completion", "answer", "ignore_case", "expected"),
    [("Paris", "Paris", False, 1), (" Paris\n", "Paris", False, 1), ("paris", "Paris", False, 0),
     ("paris", "Paris", True, 1), ("Paris.", "Paris", True, 0), ("", "Paris", False, 0),
     ("cafe\u0301", "caf\u00e9", False, 1), ("CAFE\u0301", "caf\u00e9", True, 1), ("x\u00b2", "x2", False, 0)],
)  # fmt: skip
async def test_exact(open_run, make_item, completion, answer, ignore_case, expected):
    assert await score(open_run, make_item(completion, answer), kind="exact", ignore_case=ignore_case) == expected


@pytest.mark.parametrize(
    ("completion", "expected"),
    [("<answer> The Beatles! </answer>", 1), ("<answer>beatles</answer>", 1), ("<answer>A fab  four</answer>", 1),
     ("<answer>no</answer> <answer>Beatles</answer> I am sure", 1), ("<answer>Beatles</answer> <answer>no</answer>", 0),
     ("Beatles", 0), ("<answer>Beatles", 0), ("Beatles</answer>", 0), ("<answer></answer>", 0),
     ("<answer>the</answer>", 0), ("<answer>Beatles or Stones</answer>", 0), ("", 0)],
)  # fmt: skip
async def test_answer(open_run, make_item, completion, expected):
    item = make_item(completion, "Beatles", extra={"answers": ["The Beatles", "fab four"]})
    assert await score(open_run, item, kind="answer", answers_key="answers") == expected
    if "four" not in completion:
        assert await score(open_run, item, kind="answer") == expected


@pytest.mark.parametrize(
    ("completion", "answers", "expected"),
    [("A", ["A"], 1), ("B", ["A"], 0), ("A", ["the", "A"], 1), ("Paris", ["", "Paris"], 1), ("5", ["-5"], 0),
     ("-5", ["-5"], 1), ("- 5", ["-5"], 1), ("\u2212 $5", ["5"], 0), ("x < - 3", ["x < 3"], 0),
     ("(1, - 5)", ["(1,-5)"], 1),
     ("C", ["C++"], 0), ("", ["?"], 0), ("?", ["?"], 1), ("the", ["A"], 0)],
)  # fmt: skip
async def test_what_is_taken_from_an_answer_may_be_the_answer(open_run, make_item, completion, answers, expected):
    item = make_item(f"<think><answer>A</answer></think><answer>{completion}</answer>", extra={"answers": answers})
    assert await score(open_run, item, kind="answer", answers_key="answers") == expected


@pytest.mark.parametrize("part", [" ", "\t", "`", "~", "1", "-", "answer ", "**", '"', "#", "1,", "\\boxed{", "{"])
def test_no_text_of_a_policy_takes_more_than_linear_time(part: str) -> None:
    """These run on the service's event loop. Quadratic time would be three seconds or more."""
    for begin, end in (("", "x"), ("#### answer", "x\nmore"), ("```python\n", "\nprint(1)\n```"), ("```\nx", "y")):
        text, began_s = begin + part * (100_000 // len(part)) + end, time.process_time()
        _final_number(text), normalize(text), after_reasoning(text), unindent(text), list(blocks(text))
        assert _NUMBER.fullmatch(text) is None
        assert time.process_time() - began_s < 1.5


@pytest.mark.parametrize("answers", [None, "Beatles", [], ["", " "], [1]])
async def test_answers_that_accept_nothing_are_no_score(open_run, make_item, answers):
    item = make_item("<answer>the</answer>", "x", extra={} if answers is None else {"answers": answers})
    async with open_run({"kind": "answer", "answers_key": "answers"}) as run:
        (outcome,) = await run.score([item])
    assert outcome.failure and outcome.failure.reason is FailureReason.INVALID_ANSWER


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("6 * 7 = 42\n#### 42", "#### 42", 1),
        ("#### 41 no, #### 42", "42", 1),
        ("#### 42 no, #### 41", "42", 0),
        ("#### $1,234.50 in total", "1234.5", 1),
        ("#### -$5", "-5", 1),
        ("#### $-5", "-5", 1),
        ("#### \N{MINUS SIGN}5", "-5", 1),
        ("#### 0 apples of 9", "He eats 9 of 9.\n#### 0", 1),
        ("#### none; 42", "42", 1),
        ("42\n#### none", "42", 0),
        ("So she has 1,000,000.", "1000000", 1),
        ("between 3-5", "5", 1),
        ("it is 7-2", "-2", 0),
        ("it is -2", "-2", 1),
        ("1,2,3", "3", 1),
        ("1,2,3", "123", 0),
        ("12,3456", "123456", 0),
        ("half is .5", "0.50", 1),
        ("42.0 %", "42", 1),
        ("no number", "42", 0),
        ("٤٢", "42", 0),
        ("", "42", 0),
        ("9" * 5000, "9" * 5000, 1),
        ("#### Conclusion\nSo it is 42.", "42", 1),
        ("#### Step 1: 6 sevens\nadd\n#### Step 2: sum\nThat makes 42.", "42", 1),
        ("#### 1. Count\nsix\n#### 2. Add\nThat makes 42", "42", 1),
        ("#### 42\n#### Why\n6 times 7", "42", 1),
        ("##### Part 1\nIt is 42", "42", 1),
        ("#### 42\n\nI hope that helps 1 person!", "42", 1),
        ("#### Answer: 42\n\nI hope that helps 1 person!", "42", 1),
        ("#### 41\n\nIt could be 42", "42", 0),
        ("#### $42$\nDone 1", "42", 1),
        ("#### \\boxed{42}\nDone 1", "42", 1),
        ("#### **42**\nDone 1", "42", 1),
        ("<think>#### 41\n</think>It is 42", "42", 1),
        ("[THINK]#### 42\n[/THINK]It is 41", "42", 0),
        ("<think>[/THINK] is #### 41\n</think>It is 42", "42", 1),
        ("42 #### Solution\nNo, 41", "#### Solution\nSo: 42", 0),
        ("#### 1{,}234", "1,234", 1),
        ("\uff14\uff12", "42", 1),
        ("42\u00b2 is not", "42", 1),
        ("The area is 42 m^2.", "42", 1),
        (r"so \boxed{42\text{ cm}^2}", "42", 1),
        ("It is 42 m2, or x_{12} = 42", "42", 1),
        ("It emits 42 kg of CO2.", "42", 1),
        ("It costs USD20.", "20", 1),
        ("#### RM42", "42", 1),
        ("The answer is __42__, or _42_.", "42", 1),
        ("It was in 05/2024", "2024", 1),
        ("The roots are x_1,42", "42", 1),
        ("It was on 5/18/2020", "2020", 1),
        ("#### 42 m^2", "42 m^2", 1),
        ("It is Rs 1,80,000.", "180000", 1),
        ("It is 12:30", "30", 0),
        ("It takes 42 minutes, until 12:30", "42", 1),
        ("It is 6:00 pm", "6", 1),
        ("#### 2", "42 m^2", 0),
        ("#### 1/2", "1/2", 1),
        ("#### 2", "1/2", 0),
        ("#### 1/2", "1", 0),
        ("#### 1/2", "0.5", 1),
        ("#### 1 1/2", "1.5", 1),
        ("#### 6e-05", "6e-05", 1),
        ("#### 5", "6e-05", 0),
        ("#### 1000000", "1e6", 1),
        (r"#### -\$5", "-5", 1),
        (r"#### -\$5", "5", 0),
        ("#### 1\u202f000", "1000", 1),
        ("#### - 5", "-5", 1),
        ("#### - $5", "5", 0),
        ("#### **- 5**", "#### - 5", 1),
        ("#### The total - 5 apples", "5", 1),
        ("#### 1 000 000", "1000000", 1),
        ("#### 12 500.5 kg", "12500.5", 1),
        ("#### 1 500/1000", "1.5", 1),
        ("#### CO2 200", "200", 1),
        ("#### 2024 100", "2024", 1),
        ("It sold 2 200 times", "200", 1),
        ("#### 48 + 24 = 72 clips", "72", 1),
        ("#### Total = 48 + 24 = 72", "72", 1),
        ("#### 48+24=72", "48", 0),
        ("#### 72 = 48 + 24", "72", 1),
        ("#### 72 (6*12=72, 2+3=5)", "72", 1),
        (r"It is \frac{7}{2}", "3.5", 1),
        (r"#### -3\frac{1}{2}", "-3.5", 1),
        (r"She makes $\boxed{42}$ dollars in 2 days.", "42", 1),
        (r"\boxed{41}, no: \boxed{42\text{ days}}. (Step 2)", "42", 1),
        (r"\boxed{2 \times 21 = 42} of 50", "42", 1),
        (r"\boxed{\frac{1}{2}} of 3", "0.5", 1),
        (r"It is 42, not \boxed{}", "42", 1),
        ("#### 8 x 9 = 72", "72", 1),
        ("#### 8 x 9 = 72", "8", 0),
        ("#### 48 in April + 24 in May = 72", "72", 1),
        ("#### 25% + 15% = 40%", "40", 1),
        ("#### Rs.72", "72", 1),
        ("It costs Rs.0.50.", "0.5", 1),
        ("#### 2\u00bd", "2.5", 1),
        ("#### 2", "2\u00bd", 0),
        ("It sells for $72k.", "72000", 1),
        (r"#### -\$1.5K a year", "-1500", 1),
        ("#### $72k", "72", 0),
        ("#### $72kg", "72", 1),
        ("a ring of 14k", "14", 1),
    ],
)
async def test_gsm8k(open_run, make_item, completion, answer, expected):
    assert await score(open_run, make_item(completion, answer), kind="gsm8k") == expected


async def test_gsm8k_may_require_the_marker(open_run, make_item):
    assert await score(open_run, make_item("it is 42", "42"), kind="gsm8k", require_marker=True) == 0
    assert await score(open_run, make_item("#### 42", "42"), kind="gsm8k", require_marker=True) == 1
    assert await score(open_run, make_item("#### End\n42", "42"), kind="gsm8k", require_marker=True) == 0


@pytest.mark.parametrize("answer", ["", "#### none", "unknown"])
async def test_gsm8k_answer_without_a_number_is_a_failure_not_a_zero(open_run, make_item, answer):
    async with open_run({"kind": "gsm8k"}) as run:
        (outcome,) = await run.score([make_item("42", answer)])
    assert outcome.failure.reason is FailureReason.INVALID_ANSWER
    assert outcome.components == {}


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (100, 0), (125, -0.25), (200, -1), (9999, -1)])
async def test_length(open_run, make_item, num_tokens, expected):
    item = make_item("", num_tokens=num_tokens)
    assert await score(open_run, item, kind="length", target_tokens=100, max_tokens=200) == expected


async def test_format_matches_the_whole_completion_and_outlives_a_pattern_that_explodes(open_run, make_item, hurried):
    scorer = {"kind": "format", "pattern": r"<think>(x+x+)+y.*</think>\s*[0-9]+"}
    async with open_run(scorer, num_workers=1) as run:
        right, wrong = await run.score([make_item(f"<think>xxy{end}") for end in ("\nwell</think> 4", "</think> 4 ")])
        with hurried(run._scorers[0]._pool, 0.5):
            (endless,) = await run.score([make_item("<think>" + "x" * 50)])
        (after,) = await run.score([make_item("<think>xxy</think>5")])
    assert [(outcome.reward, outcome.failure) for outcome in (right, wrong, after)] == [(1, None), (0, None), (1, None)]
    assert (endless.reward, endless.failure.reason) == (0, FailureReason.TIMEOUT)
