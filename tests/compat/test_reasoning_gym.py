"""Tests that reasoning-gym evaluates no answer as Python, and still reads those that are lists and formulas."""

from pathlib import Path

import pytest
import sympy

pytest.importorskip("reasoning_gym", reason="needs the extra `environments`", exc_type=ImportError)

from services.common.reasoning_tasks import make_tasks
from services.reward.compat import refuse_eval_of_reasoning_gym
from services.reward.environments.libraries import Task

LISTS = ("binary_matrix", "n_queens", "spiral_matrix", "string_insertion")
FORMULAS = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what is replaced in sympy at the end of each test."""
    monkeypatch.setattr(sympy, "parse_expr", sympy.parse_expr)


@pytest.mark.parametrize("task", [*LISTS, *FORMULAS])
def test_an_answer_never_runs(task: str, tmp_path: Path) -> None:
    tasks = make_tasks(task, seed=1, size=1, settings={})
    refuse_eval_of_reasoning_gym()
    entry, canary = tasks[0], tmp_path / "canary"
    lowest = tasks.score_answer("no answer", entry)
    for answer in (
        f"open({str(canary)!r}, 'w')",
        "exit()",
        "(exit)()",
        "[exit()]",
        "\uff45xit()",
        "oracle_answer.split()",
    ):
        assert tasks.score_answer(answer, entry) <= max(lowest, 0.01), answer
    assert not canary.exists()
    assert tasks.score_answer(entry["answer"], entry) == 1.0


def test_a_huge_power_is_wrong_at_once() -> None:
    Task.prepare("countdown", {})
    task = Task("countdown", {})
    task.reset(1, {})
    for answer in ("9**9**9", "9 ** (9**9)", "2**10000000000", "99999999!", "factorial(99999999)"):
        assert task.step(f"<answer>{answer}</answer>")[1] <= 0.05
    for formula in ("(x**2 + 1)**2 - 2**10 + 5!", "x**(-3)*y**100"):
        assert sympy.parse_expr(formula) == sympy.sympify(formula)


def test_lists_and_formulas_are_read() -> None:
    Task.prepare("spiral_matrix", {})
    spirals, products = (make_tasks(name, seed=1, size=1, settings={}) for name in (LISTS[2], FORMULAS[2]))
    assert spirals.score_answer(str(spirals[0]["answer"].split()), spirals[0]) == 0.1
    assert products.score_answer(f"0 + {products[0]['answer']}", products[0]) == 1.0
    for formula in ("sqrt(2)*sin(x1) + 1.5e3", "log(abs(x)) + C", "Rational(1, 2)*theta*xy"):
        assert sympy.parse_expr(formula) == sympy.sympify(formula)
