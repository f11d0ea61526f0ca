"""Tests which answers the math scorer takes as equal, and that nothing of an answer is evaluated."""

import asyncio
import sys

import pytest
import pytest_asyncio

from services.reward.errors import FailureReason, ScoringError
from tests.support import LIMITS_S, PATIENCE_S

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
    ("5", r"\boxed{5.}"),
    ("5.", r"\boxed{5}"),
    ("1000", r"\boxed{1\,000}"),
    (r"1\,000", r"\boxed{1000}"),
    ("1234567.5", r"\boxed{1\,234\,567.50}"),
    ("1000", r"\boxed{1e3}"),
    ("1e3", r"\boxed{1000}"),
    ("0.0015", r"\boxed{1.5E-3}"),
    ("1000", "answer: 1e3"),
    ("(0,1)", r"\boxed{0<x<1}"),
    ("0<x<1", r"\boxed{(0,1)}"),
    ("[0,1)", r"\boxed{0 \le x < 1}"),
    (r"(3,\infty)", r"\boxed{x>3}"),
    (r"(-\infty,3]", r"\boxed{3 \ge x}"),
    ("i", r"\boxed{\sqrt{-1}}"),
    (r"\sqrt{-1}", r"\boxed{i}"),
    ("2+3i", r"\boxed{2+3\sqrt{-1}}"),
    ("0.123456789", r"\boxed{0.1234567890}"),
    (r"\frac{1}{3}", r"\boxed{0.333333}"),
    ("42", "\\boxed{\uff14\uff12}"),
    ("-4.2", "so \uff0d\uff14\uff0e\uff12"),
    ("1/2", "\\boxed{\u00bd}"),
    ("5", r"<think>\boxed{6}, or</think> \boxed{5}"),
    ("5", r"<think>\boxed{6}</think> The answer is 5."),
    ("90", "\\boxed{90\u00b0}"),
    (r"45^\circ", r"\boxed{45\degree}"),
    ("90\u00b0", r"\boxed{90}"),
    ("90", "The angle is 90\u00b0."),
    ("5", r"\boxed{5~\text{cm}}"),
    ("5", r"\boxed{5\ }"),
    ("1000", "\\boxed{1\u202f000}"),
    ("2 1/2", r"\boxed{2\frac12}"),
    ("2 1/2", r"\boxed{2.5}"),
    ("-1 1/2", r"\boxed{-\frac32}"),
    (r"\frac{3}{2}", "It is 1 1/2 cups."),
    (r"\frac32", r"\boxed{1~\frac12}"),
    (r"6.02\times 10^{23}", r"\boxed{6.02e23}"),
    ("602000000000000000000000", r"\boxed{6.02\times10^{23}}"),
    (r"1.6\times10^{-19}", r"\boxed{\frac{16}{10^{20}}}"),
    (r"\frac{1}{2^{60}}", r"\boxed{2^{-60}}"),
    ("43_7", r"\boxed{43_{7}}"),
    (r"2\sqrt{3}", "\\boxed{2\u221a3}"),
    ("x^2", "\\boxed{x\u00b2}"),
    (r"(-\infty,1)\cup(2,\infty)", "\\boxed{(-\u221e,1)\u222a(2,\u221e)}"),
    (r"(-\infty,1)\cup(2,\infty)", r"\boxed{x<1 \text{ or } x>2}"),
    (r"x<1 \text{ or } x>2", r"\boxed{(-\infty,1)\cup(2,\infty)}"),
    ("6", "\\boxed{2\u00b73}"),
    (r"\emptyset", r"\boxed{\varnothing}"),
    ("5", "\\boxed{\u20ac5}"),
    ("2025-05-03", r"\boxed{2025-05-03}"),
    ("10:00", r"\boxed{10:00}"),
    ("x<-1, x>1", r"\boxed{(-\infty,-1)\cup(1,\infty)}"),
    ("\\text{cm\u00b2}", "\\boxed{\\text{cm\u00b2}}"),
    (r"12 1/2\%", r"\boxed{12 1/2\%}"),
    (r"\frac{1}{54145}", r"\boxed{0.000018}"),
    ("(0,1]", r"\boxed{\bigl(0,1\bigr]}"),
    (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\boxed{\begin{pmatrix}1\\[2pt] 3\end{pmatrix}}"),
    (r"2+3\mathrm{i}", r"\boxed{2+3i}"),
    (r"\frac{1}{\mathrm{e}}", r"\boxed{e^{-1}}"),
    (r"0.1\overline{6}", r"\boxed{\frac16}"),
    (r"-\frac{4}{3}", r"\boxed{-1.\dot{3}}"),
    (r"\frac{41}{333}", r"\boxed{0.\dot{1}2\dot{3}}"),
    (r"\lg 2", r"\boxed{\log_{10} 2}"),
    (r"\ln 3", r"\boxed{\log_e 3}"),
    (r"\langle 1,2,3 \rangle", r"\boxed{(1,2,3)}"),
    (r"4^{\text{th}}", r"\boxed{4}"),
    ("204", r"\boxed{\color{blue}\Large 204}"),
    (r"17.5\%", r"\boxed{17.5}"),
    (r"12_{\text{five}}", r"\boxed{12_5}"),
    ("2,3", r"So $x = \boxed{2}$ or $x = \boxed{3}$."),
    ("-1,2", r"The solutions are $\boxed{-1}$ and $\boxed{2}$."),
    (r"\{1,234\}", r"\boxed{1}, \boxed{234}"),
    (r"x=\boxed{2}\quad\text{or}\quad x=\boxed{3}", r"\boxed{2,3}"),
    ("1/2", r"\boxed{\frac12} or \boxed{0.5}"),
    ("C", r"$\boxed{3}$, or \boxed{\text{(C)}}"),
    ("5", r"$x=\boxed{2}$, $y=\boxed{3}$, so \boxed{5}"),
    (r"1-\frac{1}{2023!}", r"\boxed{\frac{2023!-1}{2023!}}"),
    (r"\frac{e^{-50}50^{50}}{50!}", r"\boxed{\frac{50^{49}}{e^{50}49!}}"),
    (r"\sqrt{3+2\sqrt{2}}", r"\boxed{1+\sqrt{2}}"),
    ("3,4", r"\boxed{4\text{ cm}, 3\text{ cm}}"),
    (r"2 \text{ hours } 30 \text{ minutes}", r"\boxed{2\text{ h and }30\text{ min}}"),
    ("150", r"\boxed{150\text{ minutes} = 2\text{ h } 30\text{ min}}"),
    (r"60 \mathrm{km} / \mathrm{h}", r"\boxed{60}"),
    ("1:2:3", r"\boxed{a:b:c = 2:4:6}"),
    ("4:9", r"\boxed{4/9}"),
    ("3.14", r"\boxed{\approx 3.14}"),
    (r"k_{\max}=4", r"\boxed{4}"),
    ("17", r"It is \boxed{17}. I put it in \boxed{} as asked, or `\boxed{...}`."),
    (r"\frac{1}{2}", r"It is 3 or <answer>\frac12</answer>, so 4."),
    ("x<3", "<answer>x<3</answer>"),
    ("42", "<answer>The answer is 42</answer>"),
    ("7", "<answer>It's 7</answer>"),
    ("7", "<answer>=7</answer>"),
    ("42", "<answer>42 dollars</answer>"),
    ("512", "it is 2 ** 3 ** 2"),
    ("3/4", "**Answer: 3/4**"),
    ("8", "it is 2**3"),
    (r"9:00 \text{ a.m.}", r"\boxed{9:00 \text{ AM}}"),
    (r"\text{3:30 p.m.}", r"\boxed{3:30}"),
    ("4:15", r"\boxed{8:30}"),
    (r"\text{July 4}", r"\boxed{July 4}"),
    (r"\text{B, C}", r"\boxed{\text{B}, \text{C}}"),
    (r"\textbf{(D)}\ 24", r"\boxed{24}"),
    (r"\textbf{(D) }24", r"\boxed{\text{D}}"),
    ("24", r"\boxed{\textbf{(D)}\ 24}"),
    ("D", r"\boxed{\text{(D) } 24}"),
    (r"\textbf{(D)}\ \frac{1}{2}", r"\boxed{\mathrm{(D)\ } 0.5}"),
    ("B", r"\boxed{\text{B. Paris}}"),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\boxed{\frac{1+\sqrt5}{2}, \frac{1-\sqrt5}{2}}"),
    (r"\frac{-1\pm i\sqrt{3}}{2}", r"\boxed{x = \frac{-1 \pm i\sqrt{3}}{2}}"),
    ("x=2, y=3", r"\boxed{(2,3)}"),
    (r"x=2\text{ and }y=3", r"\boxed{y=3, x=2}"),
    ("(2,3)", r"\boxed{x=2, y=3}"),
    (r"x\ne0", r"\boxed{(-\infty,0)\cup(0,\infty)}"),
    (r"62\frac12\%", r"\boxed{62.5\%}"),
    (r"62.5\%", r"\boxed{62 \tfrac{1}{2}\text{ percent}}"),
    ("18", r"\boxed{18 dollars per day}"),
    ("5 rows", r"\boxed{5}"),
    ("5 xyzw", r"\boxed{5xyzw}"),
    ("18", r"\boxed{18 pairs of shoes a day}"),
    ("-4", r"\boxed{-4 degrees Celsius}"),
    ("3", r"\boxed{3 months old}"),
    (r"2\frac{1}{3}", r"\boxed{2 1/3 cups}"),
    (r"12\pi", r"\boxed{12 pi}"),
    (r"\frac{\pi}{3}", r"\boxed{\frac{\pi}{3} radians}"),
    ("0.75", r"\boxed{\text{\frac{3}{4} cups}}"),
    ("A", r"\boxed{\text{A}.}"),
    ("A", r"\boxed{\text{A.}}"),
    (r"50\%", r"\boxed{50 percent.}"),
    ("x+1", r"\boxed{x+1.}"),
    ("4 in.", r"\boxed{4}"),
    ("250", r"\boxed{250 mL}"),
    ("10^-3", r"\boxed{0.001}"),
    ("3", r"\boxed{\boldsymbol{3}}"),
    ("5 million", r"\boxed{\$5,000,000}"),
    ("500", r"\boxed{5\text{ hundred} dollars/hour}"),
    ("18 ft^2", r"\boxed{18 km/h}"),
    (r"\sqrt{\frac{\pi}{2}}", r"\boxed{\sqrt\frac\pi2}"),
    (r"\sqrt[3]{2}", r"\boxed{2^\frac13}"),
    ("1, 2", "<answer>x = 1 or x = 2</answer>"),
    ("B", "The answer is A? No. Answer: (B) Paris"),
    ("north", r"\boxed{\text{North}}"),
    (r"2\mathbf{i}-\mathbf{j}", r"\boxed{-\hat{\mathbf{j}}+2\overrightarrow i}"),
    ("x=2", r"\boxed{\boldsymbol{x}=2}"),
    ("abcd", r"\boxed{bacd}"),
]

WRONG = [
    ("5", "It is 5. <answer>6</answer>"),
    ("5", r"<answer>3 \approx 5</answer>"),
    ("5", r"<answer>3\text{ 5}</answer>"),
    ("2", "**2** and 3"),
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
    ("0.123456789", r"\boxed{0.123456788}"),
    ("0.123456789", "the answer is 0.123456788"),
    ("1000", r"\boxed{1e4}"),
    ("100", r"\boxed{1\,00}"),
    ("[0,1]", r"\boxed{0<x<1}"),
    ("(0,1)", r"\boxed{0<x<2}"),
    ("(0,1)", r"\boxed{y>x>0}"),
    ("(-1,1)", r"\boxed{x^2<1}"),
    ("i", r"\boxed{-\sqrt{-1}}"),
    ("i", r"\boxed{5}"),
    ("2 1/2", r"\boxed{3/2}"),
    ("1 1/2", r"\boxed{1}"),
    (r"6.63\times10^{-34}", r"\boxed{1.6\times10^{-19}}"),
    (r"\frac{1}{2^{60}}", r"\boxed{\frac{1}{2^{61}}}"),
    (r"\frac{1}{20!}", r"\boxed{\frac{1}{19!}}"),
    ("e^{-40}", r"\boxed{e^{-41}}"),
    ("1e-9", r"\boxed{10^{-7}}"),
    ("0.000000016", r"\boxed{0.000000091 \text{ m}}"),
    ("43_7", r"\boxed{43_8}"),
    ("2025-05-03", r"\boxed{2025-03-05}"),
    ("2025-05-03", r"\boxed{2017}"),
    ("10:00", r"\boxed{10:30}"),
    ("10:00", r"\boxed{9:00}"),
    (r"\mathbb{R}", r"\boxed{x>1, x<5}"),
    (r"(1,\infty)", r"\boxed{x>1, x>2}"),
    ("5", r"\boxed{x<\sqrt{-1}}"),
    (r"x<\arcsin 2", r"\boxed{(1,2)}"),
    ("0.1", r"\boxed{0.1\overline{6}}"),
    ("0.5", r"\boxed{0.5\%}"),
    (r"12_{\text{five}}", r"\boxed{12_6}"),
    ("3", r"So $x = \boxed{2}$ or $x = \boxed{3}$."),
    ("1234", r"\boxed{1}, \boxed{234}"),
    ("1:2:3", r"\boxed{1:3:2}"),
    ("3:4:5", r"\boxed{3:20}"),
    (r"1:\sqrt{3}:2", r"\boxed{1:2:\sqrt{3}}"),
    (r"1-\frac{1}{2023!}", r"\boxed{1-\frac{1}{2022!}}"),
    (r"2 \text{ hours } 30 \text{ minutes}", r"\boxed{2\text{ hours }45\text{ minutes}}"),
    (r"x = 2 \text{ m}, y = 3 \text{ m}", r"\boxed{x=2\text{ m}, y=4\text{ m}}"),
    (r"30 \text{ pears and } 20 \text{ plums}", r"\boxed{20 \text{ pears and } 30 \text{ plums}}"),
    ("5", r"\boxed{5 \text{ ft } 3 \text{ in}}"),
    (r"\frac{52!}{(13!)^4}", r"\boxed{\frac{52!}{(13!)^4 4!}}"),
    (r"\frac{e^{-50}50^{50}}{50!}", r"\boxed{\frac{e^{-50}50^{49}}{50!}}"),
    (r"\frac{1}{e}-\frac{1}{50!}", r"\boxed{\frac{1}{e}}"),
    ("3:30", r"\boxed{2:20}"),
    ("3:30", r"\boxed{\frac{1}{10}}"),
    (r"9:00 \text{ a.m.}", r"\boxed{9:00 \text{ p.m.}}"),
    (r"\text{July 4}", r"\boxed{July 5}"),
    ("D", r"\boxed{\textbf{(C)}\ 24}"),
    ("24", r"\boxed{\textbf{(D)}\ 25}"),
    (r"\textbf{(D)}\ 24", r"\boxed{\textbf{(C)}\ 24}"),
    (r"\textbf{(D)}\ 24", r"\boxed{\textbf{(D)}\ 25}"),
    (r"\textbf{(D)}\ \frac{1}{2}", r"\boxed{C. \frac{1}{2}}"),
    ("A", r"\boxed{\text{(A) and (C)}}"),
    (r"\frac{1\pm\sqrt{5}}{2}", r"\boxed{\frac{1+\sqrt5}{2}}"),
    ("x=2, y=3", r"\boxed{(3,2)}"),
    ("x=2, y=3", r"\boxed{3, 2}"),
    ("x=2, y=3", r"\boxed{x=2, x=3}"),
    (r"x=2 \text{ or } x=3", r"\boxed{x=2, y=3}"),
    ("(2,3)", r"\boxed{y=2, x=3}"),
    (r"x\ne0", r"\boxed{x>0}"),
    (r"62\frac{1}{2}\%", r"\boxed{37\frac{1}{2}\%}"),
    ("0.5", r"\boxed{0.5\text{ percent}}"),
    ("5", r"\boxed{5 million}"),
    ("5", r"\boxed{5 Million}"),
    ("5", r"\boxed{5 thousands}"),
    ("5", r"\boxed{5 boys and girls}"),
    ("5", r"\boxed{5 feet six inches}"),
    ("5", r"\boxed{5 degrees below zero}"),
    ("3", r"\boxed{3 fourth}"),
    ("5", r"\boxed{5 times three}"),
    ("2", r"\boxed{2 arctanx}"),
    ("4 abcd", r"\boxed{4}"),
    ("2", r"\boxed{2 cosx}"),
    ("5 xyz", r"\boxed{5}"),
    (r"x\ne0", r"\boxed{x\ne1}"),
    ("5", r"\boxed{5\text{ million}}"),
    (r"\frac{1}{3}", r"\boxed{2^\frac{1}{3}}"),
    ("B", "The answer is (B) or (C)."),
    ("BAC", r"\boxed{ABC}"),
    (r"2\mathbf{i}+3\mathbf{j}", r"\boxed{2\mathbf{i}-\mathbf{j}}"),
    ("(1,2)", r"\boxed{1, 2, 2}"),
    (r"1<x<2", r"\boxed{1,2}"),
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
    assert [o for o in outcomes if o.failure or o.components != {"math": 0.0}] == []


@pytest.mark.parametrize("answer", ["", r"\frac{1}{2", r"\frac{1}{0}", r"\ge 2", r"\boxed{}", "1}{2"])
async def test_an_unreadable_reference_is_a_failure_for_right_and_wrong_samples(run, make_item, answer):
    outcomes = await run.score([make_item(r"\boxed{1}", answer), make_item(rf"\boxed{{{answer}}}", answer)])
    assert [outcome.failure.reason for outcome in outcomes] == [FailureReason.INVALID_ANSWER] * 2


async def test_a_box_can_be_required(open_run, make_item):
    async with open_run({"kind": "math", "require_boxed": True}, num_workers=1) as run:
        outcomes = await run.score([make_item("the answer is $5$", "5"), make_item(r"\boxed{5}", "5")])
    assert [outcome.reward for outcome in outcomes] == [0.0, 1.0]


BOMB = r"\boxed{9^{9^9}}"


async def test_a_bomb_is_wrong_and_the_next_sample_need_not_wait_for_a_restart(open_run, make_item, monkeypatch):
    async with open_run({"kind": "math"}, num_workers=1) as run:
        pool = run._scorers[0]._pool
        restarting = asyncio.Event()

        async def never(worker) -> None:
            restarting.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(pool, "_start", never)
            patch.setattr(pool, "_timeout_s", LIMITS_S[0])
            bomb = asyncio.create_task(run.score([make_item(BOMB, "5")]))
            await restarting.wait()
            patch.setattr(pool, "_timeout_s", PATIENCE_S)
            (honest,) = await run.score([make_item(r"\boxed{5}", "5")])
            (outcome,) = await bomb
    assert (honest.reward, outcome.components, outcome.failure) == (1.0, {"math": 0.0}, None)


async def test_a_group_of_bombs_ends_in_its_time_limit(open_run, make_item):
    """Tests the time limit of a group in which one sample alone might take ten minutes."""
    async with open_run({"kind": "math"}, timeout_s=600, group_timeout_s=4, num_workers=1) as run:
        outcomes = await settle_group(run, [make_item(BOMB, "5") for _ in range(2)])
    assert [outcome.components for outcome in outcomes] == [{"math": 0.0}] * 2


async def settle_group(run, items):
    for limit_s in LIMITS_S:
        run._scorers[0]._group_timeout_s = 4 * limit_s
        outcomes = await run.score(items)
        if not any(outcome.failure for outcome in outcomes):
            break
    return outcomes


@pytest.mark.parametrize(("key", "words"), [("timeout_s", ""), ("group_timeout_s", "a share of ")])
async def test_an_answer_of_the_dataset_that_never_ends_is_a_failure(open_run, make_item, key, words):
    async with open_run({"kind": "math"}, **{key: 1.0}, num_workers=1) as run:
        failure = (await run.score([make_item(r"\boxed{5}", "(" * 900 + "1" + ")" * 900)]))[0].failure
    assert (failure.reason, failure.detail) == (FailureReason.TIMEOUT, f"no answer within 1 s ({words}{key})")


async def test_a_worker_that_something_else_killed_costs_no_sample(open_run, make_item, monkeypatch):
    async with open_run({"kind": "math"}, num_workers=1) as run:
        pool, calls = run._scorers[0]._pool, []
        call = pool.call

        async def killed_once(fields, limit_s):
            calls.append(fields)
            if len(calls) == 1:
                raise ScoringError(FailureReason.CRASHED, "worker died with exit code -9")
            return await call(fields, limit_s)

        monkeypatch.setattr(pool, "call", killed_once)
        (outcome,) = await run.score([make_item(r"\boxed{5}", "5")])
    assert (outcome.reward, outcome.failure) == (1.0, None)


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
