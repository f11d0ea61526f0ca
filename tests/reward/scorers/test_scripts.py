"""Tests which values pass between a script and the program, which runs in another process."""

# ruff: noqa: E501 a program reads best on one line

import pytest
import pytest_asyncio

from tests.reward.scorers.test_code import LIMITS, PATIENCE_S, sandboxed

pytestmark = sandboxed

HONEST = [
    ("def f(x): x.sort()", "x = [3, 1, 2]; f(x); assert x == [1, 2, 3]"),
    ("def f(x):\n    for row in x: row[0] = 0", "x = [[1], [2]]; first = x[0]; f(x); assert x == [[0], [0]] and first == [0]"),
    ("def f(g, x): return [g(y) for y in x]", "assert f(lambda y: y * y, [1, 2]) == [1, 4] and f(str, [1]) == ['1']"),
    ("def f(n): return 10 ** n", "assert f(5000) == 10 ** 5000"),
    ("def f(): yield from (1, 2)", "assert list(f()) == [1, 2] and next(f()) == 1"),
    ("def f(): return {1, 2}, (3, [4]), {5: b'6'}, 1.5, 2j, range(3), None", "assert f() == ({1, 2}, (3, [4]), {5: b'6'}, 1.5, 2j, range(3), None)"),
    ("from decimal import Decimal\ndef f(): return Decimal('0.1')", "from decimal import Decimal; assert f() == Decimal('0.1')"),
    ("from collections import Counter, deque\ndef f(x): return Counter(x), deque(x)", "c, d = f('aab'); assert c.most_common(1) == [('a', 2)] and d.pop() == 'b'"),
    ("class Stack:\n    def __init__(self): self.x = []\n    def push(self, x): self.x.append(x)\n    def __len__(self): return len(self.x)", "s = Stack(); s.push(5); assert len(s) == 1 and s.x == [5] and isinstance(s, Stack)"),
    ("class Node:\n    def __init__(self, v): self.v, self.next = v, None\ndef f(n): return n.v + (f(n.next) if n.next else 0)", "a = Node(1); a.next = Node(2); assert f(a) == 3 and a.next.v == 2"),
    ("class Cache(dict):\n    def put(self, k, v): self[k] = v", "c = Cache(); c.put(1, 2); assert c == {1: 2} and c[1] == 2"),
    ("class Bad(ValueError): pass\ndef f(): raise Bad('x')", "try: f()\nexcept Bad as e: assert isinstance(e, ValueError) and str(e) == 'x'\nelse: assert False"),
    ("def f(x): return x / 0", "try: f(1)\nexcept ZeroDivisionError: pass\nelse: assert False"),
    ("def f(): print('hello')", "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as out: f()\nassert out.getvalue() == 'hello\\n'"),
    ("class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)\n    def __mul__(s, n): return V(s.x * n)\n    def __eq__(s, o): return s.x == o.x", "assert V(1) + V(2) == V(1) * 3 and V(1) != V(2)"),
    ("import math\ndef f(): return math.pi", "assert abs(f() - math.pi) < 1e-9"),
    ("from typing import NamedTuple\nclass P(NamedTuple):\n    x: int\ndef f(): return P(1)", "assert f().x == 1 and f() == (1,)"),
]  # fmt: skip

_FAKE = """
class Fake(float):
    def __sub__(self, other): return Fake(0)
    def __abs__(self): return Fake(0)
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    __rsub__, __gt__, __le__, __ge__, __hash__ = __sub__, __lt__, __lt__, __lt__, None
class Other:
    __abs__ = lambda self: 0
    __lt__ = __gt__ = __le__ = __ge__ = __eq__ = __contains__ = lambda self, other: True
"""
FORGED = [
    (f"{_FAKE}def f(): return Fake(9)", "assert abs(f() - 0.33) < 1e-6"),
    (f"{_FAKE}Other.__sub__ = lambda self, other: 0.0\ndef f(): return Other()", "assert abs(f() - 0.33) < 1e-6"),
    (f"{_FAKE}Other.__sub__ = lambda self, other: Fake(0)\ndef f(): return Other()", "assert abs(f() - 0.33) < 1e-6"),
    (f"{_FAKE}Other.__sub__ = lambda self, other: Fake(0)\ndef f(): return Other()", "assert not f() - 1"),
    (f"{_FAKE}def f(): return Other()", "assert 3 in f()"),
    (f"{_FAKE}def f(): return Other()", "assert 3 < f() < 5"),
    ("import decimal\nclass D:\n    def __new__(cls, *_): return 0\ndecimal.Decimal = D\ndef f(): return 0", "from decimal import Decimal; assert f() == Decimal('0.5')"),
    ("import fractions\nfractions.Fraction.__eq__ = lambda *_: True\ndef f(): return fractions.Fraction(1)", "from fractions import Fraction; assert f() == Fraction(1, 2)"),
    ("import math\nmath.isclose = lambda *_, **__: True\ndef f(): return 0", "assert math.isclose(f(), 3.0) == True"),
    ("class math: isclose = lambda *_: True\ndef f(): return 0", "assert math.isclose(f(), 3.0)"),
    ("def f(x): raise StopIteration", "assert all(map(f, [1, 2]))"),
    ("def f(x): x.clear(); return []", "x = [3, 1]; assert f(x) == sorted(x)"),
    ("import os\ndef f(): os._exit(0)", "try: f()\nexcept BaseException: pass"),
    ("def f(g): return getattr(g, '__globals__', {}).get('wanted')", "wanted = 5\ndef g(): pass\nassert f(g) == 5"),
    ("def len(x): return 5\ndef f(): return []", "assert len(f()) == 5"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module")
async def run(open_run):
    async with open_run({"kind": "code", "timeout_s": PATIENCE_S, "program_timeout_s": PATIENCE_S, **LIMITS}) as opened:
        yield opened


@pytest.mark.parametrize(("program", "script"), HONEST)
async def test_an_honest_program_passes(run, make_item, program, script):
    (outcome,) = await run.score([make_item(program, extra={"tests": {"script": script}})])
    assert (outcome.components, outcome.failure) == ({"code": 1.0}, None)


@pytest.mark.parametrize(("program", "script"), FORGED)
async def test_a_forger_fails(run, make_item, program, script):
    (outcome,) = await run.score([make_item(program, extra={"tests": [script]})])
    assert (outcome.components, outcome.failure) == ({"code": 0.0}, None)


@pytest.mark.parametrize(("program", "score"), [("def f(x): return x.size() + 1", 1.0), ("def f(x): return 4", 0.0)])
async def test_an_object_of_the_test_reaches_the_program(run, make_item, program, score):
    script = "class Mine:\n    def size(self): return 2\nassert f(Mine()) == 3"
    (outcome,) = await run.score([make_item(program, extra={"tests": {"script": script}})])
    assert (outcome.components, outcome.failure) == ({"code": score}, None)


async def test_setup_is_the_tests_own(run, make_item):
    tests = {"setup": "def close(a, b): return abs(a - b) < 1", "asserts": ["assert close(f(), 9)"]}
    forged, honest = "def close(a, b): return True\ndef f(): return 0", "def f(): return 8.5"
    outcomes = await run.score([make_item(program, extra={"tests": tests}) for program in (forged, honest)])
    assert [outcome.components for outcome in outcomes] == [{"code": 0.0}, {"code": 1.0}]


@pytest.mark.parametrize("limit", [{"program_timeout_s": 1}, {}], ids=["program", "group"])
async def test_all_tests_together_have_a_limit(open_run, make_item, limit):
    """Tests the limits of a program and of a group, where each test alone might take an hour."""
    slow, endless = (
        make_item("input()", extra={"tests": {"inputs": ["x"], "outputs": [""]}}),
        make_item("while True: pass", extra={"tests": {"inputs": [""] * 20, "outputs": [""] * 20}}),
    )
    settings = {"kind": "code", "partial": True, "timeout_s": 3600, "program_timeout_s": 3600, **limit}
    async with open_run(settings, group_timeout_s=PATIENCE_S if limit else 2) as run:
        outcomes = await run.score([endless, endless, endless])
        for _ in range(8):  # on a busy machine even this program may not end in a second
            (honest,) = await run.score([slow])
            if honest.reward == 1.0:
                break
    assert [(outcome.components, outcome.failure) for outcome in outcomes] == [({"code": 0.0}, None)] * 3
    assert honest.reward == 1.0
