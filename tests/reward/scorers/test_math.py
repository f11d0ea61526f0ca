"""math: what counts as equal, and that nothing of an answer is evaluated."""

import asyncio
import sys

import pytest
import pytest_asyncio

from services.reward.scorers.base import FailureReason

RIGHT = [
    (r"\frac{1}{2}", r"so it is \boxed{0.5}"),
    (r"$\frac{1}{2}$", r"$$\boxed{\dfrac12}$$"),
    (r"Thus the answer is \boxed{\frac{3}{4}}.", r"\boxed{0.75}"),
    (r"\(5\)", r"\boxed{$5$}"),
    ("1/2", "the answer is 1/2."),
    ("72", "We set $a=5$, so the answer is 72 apples"),
    ("1,234", r"\boxed{1{,}234}"),
    ("-3", "the answer is -3"),
    ("1024", "the answer is 2^10"),
    ("7.5", "answer: 3*(4+1)/2"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("3", r"\boxed{x=3}"),
    ("12", r"\boxed{12 \text{ cm}}"),
    ("50%", r"\boxed{50\%}"),
    (r"\{1,2\}", r"\boxed{x=2 \text{ or } x=1}"),
    (r"(-\infty,3)\cup(5,\infty)", r"\boxed{(-\infty,3)\cup(5,\infty)}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    (r"\text{Tuesday}", r"\boxed{Tuesday}"),
    ("6", r"first \boxed{5}, no: \boxed{6}"),
    ("5", r"\boxed{\boxed{5}}"),
    ("5", r"a set {1,2 left open, then \boxed{5} and \{"),
    ("5", r"\boxed{5} and a box left open \boxed{7"),
]

WRONG = [
    ("5", r"first \boxed{5}, no: \boxed{6}"),
    ("5", r"$\boxed{5} and \boxed{6}$"),
    ("2", r"\boxed{1, 2, 3}"),
    ("2", r"\boxed{2 \text{ or } 3}"),
    ("2", r"\boxed{2=3}"),
    ("2", r"\boxed{\text{all of the above}}"),
    ("2", r"the answer is 2, \boxed{}"),
    ("2", ""),
    ("2", "no idea"),
    ("3", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    ("(1,2)", r"\boxed{[1,2)}"),
    ("5", r"\boxed{\frac{1}{0}}"),
    ("5", r"\boxed{" + "9" * 5000 + "}"),
]


@pytest_asyncio.fixture(scope="module")
async def run(open_run):
    async with open_run({"kind": "math"}) as opened:
        yield opened


async def test_equal_answers(run, make_item):
    outcomes = await run.score([make_item(completion, answer) for answer, completion in RIGHT])
    assert [case for case, outcome in zip(RIGHT, outcomes, strict=True) if outcome.reward != 1.0] == []


async def test_other_answers_are_wrong_and_that_is_no_failure(run, make_item):
    outcomes = await run.score([make_item(completion, answer) for answer, completion in WRONG])
    failed = [o for o in outcomes if o.failure or o.components != {"math": 0.0}]
    assert failed == []


@pytest.mark.parametrize("answer", ["", r"\frac{1}{2", r"\frac{1}{0}", r"0.\overline{3}", r"\boxed{}", "1}{2"])
async def test_an_unreadable_reference_is_a_failure_for_right_and_wrong_samples(run, make_item, answer):
    outcomes = await run.score([make_item(r"\boxed{1}", answer), make_item(rf"\boxed{{{answer}}}", answer)])
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.INVALID_ANSWER] * 2


async def test_a_box_can_be_required(open_run, make_item):
    async with open_run({"kind": "math", "require_boxed": True}, num_workers=1) as run:
        outcomes = await run.score([make_item("the answer is $5$", "5"), make_item(r"\boxed{5}", "5")])
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0]


NO_EVAL = r"""
import sys
from services.reward.graders import math
from sympy.parsing import sympy_parser

def refuse(code, *_):
    sys.exit(f"sympy evaluates {code!r}")

def hook(event, args):
    if event == "compile" and "canary" in repr(args[0]):
        sys.exit(f"something compiles {args[0]!r}")

sympy_parser.eval_expr = refuse
sys.addaudithook(hook)
for answer, completion in [
    ("5", r"\boxed{2+canary_{1}}"), ("1/2", "the answer is 17/34"), ("5", "$x^{17}+canary$"), ("0.5", r"\boxed{50\%}"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"), ("canary^2", r"\boxed{canary^2+1-1}"), ("x^3", r"\boxed{\int 3x^2 dx}"),
]:
    math.grade(answer=answer, completion=completion, require_boxed=False)
"""


async def test_no_part_of_an_answer_is_compiled_or_evaluated():
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", NO_EVAL, stderr=asyncio.subprocess.PIPE)
    _, errors = await process.communicate()
    assert (process.returncode, errors.decode()) == (0, "")
