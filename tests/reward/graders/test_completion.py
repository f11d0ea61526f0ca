"""Tests where the answer of a completion is found: behind the reasoning, in the last block of Python."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.reward.graders.code import find_program
from services.reward.graders.texts import after_reasoning, unindent

DOC = 'def f():\n    """Adds.\n\n    ```\n    f(1)\n    ```\n    """\n    return 1\n'
FLAT = 'TEXT = """\n```python\nf(1)\n```\n"""\n'
OTHER = "```python\nx = 0\n```\n"
PROGRAMS = {
    "a title": ("```python title='a.py'\nA\n```", "A\n"),
    "a file name": ("```python:main.py\nA\n```", "A\n"),
    "attributes": ("``` {.python .numberLines}\nA\n```", "A\n"),
    "a version": ("```Python3.11\nA\n```", "A\n"),
    "tildes": ("~~~python\nA\n~~~", "A\n"),
    "longer marks": ("````python\nA\n```\nB\n````", "A\n```\nB\n"),
    "CRLF": ("```python\r\nA\r\n```\r\n", "A\r\n"),
    "an example in a docstring": (f"```python\n{DOC}```\ndone", DOC),
    "an example in a text at the margin": (f"```python\n{FLAT}```\ndone", FLAT),
    "a string that is never closed": ("```python\nx = '''\n```\nBetter:\n```python\ny = '''A'''\n```", "y = '''A'''\n"),
    "no end before the next block": ("```python\nA\n```python\nB\n```", "B\n"),
    "an end behind the last line": ("```python\nA```", "A\n"),
    "no end": ("```python\nA\nB", "A\nB"),
    "a start in a line of text": ("Here is the code: ```python\nA\n```\nDone.", "A\n"),
    "a start in a line, and a block": ("Not ```python\n```python\nA\n```", "A\n"),
    "a list": ("1. So:\n   ```python\n   if x:\n       y\n   ```", "   if x:\n       y\n"),
    "an output behind it": ("```python\nA\n```\n```\n5\n```\n```json\n{}\n```", "A\n"),
    "a draft in the reasoning": (f"<think>\n{OTHER}</think>\n```python\nA\n```", "A\n"),
    "a draft, and an answer without a fence": (f"{OTHER}</think>A", "A"),
    "a draft without an end": ("<think>\n```python\nx\n</think>\n\n```python\nA\n```", "A\n"),
    "the tag in the program": ("```python\nprint(t.split('</think>')[1])\n```", "print(t.split('</think>')[1])\n"),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program(name: str) -> None:
    completion, program = PROGRAMS[name]
    assert find_program(completion, require_fence=False) == program


@given(
    st.sampled_from([DOC, FLAT, "x = 1\n", "# it's '''\nx = 1\n", 'x = \'"""\'\n']),
    st.sampled_from(["", "   ", "\t"]),
    st.sampled_from(["```", "````", "~~~"]),
    st.sampled_from(["python", "py", "Python3", ""]),
    st.sampled_from(["", "So:\n", "Use ```x```.\n\n", "<think>```python\nwrong\n```</think>\n", "```text\n5\n```\n"]),
)
def test_a_program_is_found_as_it_was_written(program: str, indent: str, mark: str, tag: str, before: str) -> None:
    lines = "".join(f"{indent}{line}" if line.strip() else line for line in program.splitlines(keepends=True))
    found = find_program(f"{before}{indent}{mark}{tag}\n{lines}{indent}{mark}\nDone.", require_fence=True)
    assert found is not None
    assert ast.dump(ast.parse(unindent(found))) == ast.dump(ast.parse(unindent(lines)))


@given(st.text(alphabet="`~'\"\\#\n a<>/think"))
def test_any_text_is_read(text: str) -> None:
    assert isinstance(find_program(text, require_fence=False), str | None)
    assert text.endswith(after_reasoning(text))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ['"""\\', "'''\n```\n", "```python\n'''\n", "'\"", "```python\n\"\"\"\\'''"])
def test_a_long_text_takes_little_time(piece: str) -> None:
    find_program("```python\n" + piece * 20_000, require_fence=True)


def test_what_is_not_indented_stays_as_it_is() -> None:
    assert unindent("x = '''\n  \n'''\n") == "x = '''\n  \n'''\n"
    assert unindent("\n  if x:\n\n    y\n") == "\nif x:\n\n  y\n"
