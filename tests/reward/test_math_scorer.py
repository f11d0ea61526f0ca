"""math: what counts as equal, and that no text stalls it or is evaluated."""

import asyncio
import sys
import time

import pytest
import pytest_asyncio

from services.reward.scorers.base import FailureReason

TIMEOUT_S = 1.5

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

# Each either would run as Python if any of it were evaluated, or strains a parser. All are wrong, at once.
HOSTILE = [
    r"\boxed{__import__('os').system('touch CANARY')}",
    r"$__import__('os').system('touch CANARY')$",
    r"the answer is __import__('os').system('touch CANARY')",
    r"\boxed{\pi + __import__('os').system('touch CANARY')}",
    r"\boxed{\begin{pmatrix}__import__('os').system('touch CANARY')\end{pmatrix}}",
    r"\boxed{[__import__('os').system('touch CANARY')]}",
    r"\boxed{x_{__import__('os').system('touch CANARY')}}",
    r"\boxed{\text{open('CANARY','w')}}",
    r"\boxed{().__class__.__base__.__subclasses__()}",
    r"answer: 1 if open('CANARY','w') else 2",
    r"\boxed{\input{/etc/passwd}}",
    r"\boxed{" + "{" * 1_000_000,
    r"\boxed{" + "{" * 200_000 + "1" + "}" * 200_000 + "}",
    r"\boxed{" * 100_000,
    "$ " * 200_000,
    "\\[" * 100_000,
    "answer " * 100_000,
    "answer is " + "(" * 1000 + "5+0" + ")" * 1000,
    r"\boxed{" + "٣" + "}",
    "9**9**",
]

# sympy never ends on these (the first is Math-Verify issue 65).
HANGS = [
    r"\boxed{\dfrac{5^{(5^{(5^{(5^5)})}-4)}-5}{16}}",
    r"\boxed{5^{5^{5^5}}}",
    r"\boxed{10^{5^{10^{10}}}}",
    r"\boxed{(10^9)!}",
    r"\boxed{\prod_{n=1}^{10^{9}} n}",
    r"\boxed{" + "(" * 900 + "1" + ")" * 900 + "}",
    r"\boxed{\sin(10^{10^{10}})}",
    "the answer is 9^9^9^9",
]


@pytest_asyncio.fixture(scope="module")
async def run(open_run, tmp_path_factory):
    # The workers' working directory is where a canary would appear.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("workers"))
        async with open_run({"kind": "math"}, timeout_s=TIMEOUT_S) as opened:
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


async def test_hostile_texts_are_wrong_and_nothing_of_them_runs(run, make_item, tmp_path_factory):
    outcomes = await run.score([make_item(text, "5") for text in HOSTILE])
    assert [(t[:60], o) for t, o in zip(HOSTILE, outcomes, strict=True) if o.components != {"math": 0.0}] == []
    assert list(tmp_path_factory.getbasetemp().rglob("*CANARY*")) == []


async def test_endless_answers_end_typed_and_in_time_and_the_next_samples_are_right(run, make_item):
    async def grade(text: str) -> tuple[str, FailureReason | None, bool]:
        start = time.monotonic()
        (outcome,) = await run.score([make_item(text, "16")])
        in_time = time.monotonic() - start < TIMEOUT_S + 3  # a hang would never end
        return text[:60], outcome.failure and outcome.failure.reason, in_time

    # Two at a time, as many as there are workers, so that the time measured has no queue in it.
    pairs = [await asyncio.gather(*map(grade, HANGS[at : at + 2])) for at in range(0, len(HANGS), 2)]
    assert [result for pair in pairs for result in pair] == [(t[:60], FailureReason.TIMEOUT, True) for t in HANGS]
    outcomes = await run.score([make_item(rf"\boxed{{{n}}}", "16") for n in (16, 17)])
    assert [outcome.components for outcome in outcomes] == [{"math": 1.0}, {"math": 0.0}]


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
