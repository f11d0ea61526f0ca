"""Programs with their tests and the fraction that they pass."""

# ruff: noqa: E501 a program reads best on one line

ADD = "def add(a, b): return a + b"
CALL = {"inputs": [[2, 3]], "outputs": [5], "fn_name": "add"}
STATEMENTS = [
    "assert add(2, 3) == 5",
    "assert add(2, 3) == sum([2, 3])",
    "def check(f):\n    assert f(2, 3) == 5\n    assert f(9, 1) == sum([9, 1])\ncheck(add)",
    "import unittest\nclass T(unittest.TestCase):\n    def test_add(self): self.assertEqual(add(2, 3), 5)",
]


def pairs(*cases: tuple[str, str]) -> dict:
    return {"inputs": [given for given, _ in cases], "outputs": [wanted for _, wanted in cases]}


READ = "a, b = map(int, input().split())\n"
HONEST = [
    (READ + "print(a + b)", pairs(("2 3", "5"), ("2 3\n", "5\n")), 1.0),
    (READ + "print(a + b)", pairs(("2 3", "5"), ("2 3", "6")), 0.5),
    (READ + "print(a + b, end='')\nimport sys\nsys.exit()", pairs(("2 3", "  5 \n\n")), 1.0),
    ("if __name__ == '__main__':\n    print(input())", pairs(("x", "x")), 1.0),
    ("import sys\nfor line in sys.stdin: print(line[::-1].strip())", pairs(("ab\ncd\n", "ba\ndc")), 1.0),
    ("import sys\nprint(len(sys.stdin.buffer.read()))", pairs(("é" * 1000_000, "2000000")), 1.0),
    ("print('a b')\nprint('c')", pairs(("", "a  b \nc"), ("", "a b c"), ("", "a\nb\nc"), ("", "a b\nC")), 0.25),
    ("print(1/3, 1e6)", pairs(("", "0.3333333 1000000.0"), ("", "0.33333 1000000.0"), ("", "0 1000000.0")), 1 / 3),
    ("print('1.0')", pairs(("", "1"), ("", "1.00"), ("", "nan")), 1 / 3),
    ("print('é😀')", pairs(("", "é😀")), 1.0),
    ("", pairs(("", "")), 1.0),
    ("import random\nrandom.seed(0)\nprint(list({'a', 'b', 'c'}) == sorted('abc'), end='')", pairs(("", "?")), 0.0),
    ("def f(n): return n and f(n - 1)\nimport sys\nsys.setrecursionlimit(10**5)\nprint(f(50000))", pairs(("", "0")), 1.0),
    ("import threading\nt = threading.Thread(target=print, args=(7,))\nt.start()", pairs(("", "7")), 1.0),
    ("import multiprocessing as m\nwith m.get_context('fork').Pool(2) as p: print(sum(p.map(abs, [-1, 2])))", pairs(("", "3")), 0.0),
    ("open('x', 'w').write('5')\nprint(open('/tmp/x').read())", pairs(("", "5")), 1.0),
    ("import collections, heapq, itertools, math, re, bisect, functools, decimal, fractions, datetime\nprint(5)", pairs(("", "5")), 1.0),
    (ADD, CALL, 1.0),
    ("class Solution:\n    def add(self, a, b): return a + b", CALL, 1.0),
    (ADD, {"inputs": ["[1]\n[2, 3]"], "outputs": ["[1, 2, 3]"], "fn_name": "add"}, 1.0),
    ("def f(x): return (x, {1: x})", {"inputs": [[1], [0.1]], "outputs": [[1, {"1": 1}], [0.1, {"1": 0.1000000001}]], "fn_name": "f"}, 1.0),
    ("def f(): return True", {"inputs": [[]], "outputs": [True], "fn_name": "f"}, 1.0),
    ("def f(): return '5'", {"inputs": [[]], "outputs": [5], "fn_name": "f"}, 0.0),
    ("def f(): print('noise'); return 5", {"inputs": [[]], "outputs": [5], "fn_name": "f"}, 1.0),
    ("def f(): return {1}", {"inputs": [[]], "outputs": [[1]], "fn_name": "f"}, 0.0),
    (ADD, STATEMENTS, 1.0),
    ("def add(a, b): return 5", STATEMENTS, 0.75),
    (ADD, ["assert add(0.1, 0.2) == 0.3", "assert add(0.1, 0.2) == 0.30000000000000004"], 0.5),
    ("def f(): return {(1, 'a'): {2, 3}, None: b'x'}", ["assert f() == {None: b'x', (1, 'a'): {3, 2}}"], 1.0),
    ("def f(): return [1, 2]", ["assert f() == (1, 2)", "assert tuple(f()) == (1, 2)"], 0.5),
    ("def f(): return {2: [True], 1: 1.0}", ["assert f() == {1: 1, 2: [1]}", "x = f()\nassert x != {1: 2}"], 1.0),
    ("from collections import Counter as f", ["assert f('aab') == {'a': 2, 'b': 1}"], 1.0),
    ("def area(r): return math.pi * r", {"setup": "import math", "asserts": ["assert math.isclose(area(1), 3.14159265, rel_tol=1e-6)"]}, 1.0),
    ("def f(x):\n    if x < 0: raise ValueError", {"script": "try: f(-1)\nexcept ValueError: pass\nelse: assert False"}, 1.0),
    ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", {"script": "assert f() == 0.5"}, 1.0),
    ("class V:\n    def __init__(s, x): s.x = x\n    def __eq__(s, o): return s.x == o.x", ["assert V(1) == V(1)", "assert V(1) == V(2)"], 0.5),
    (ADD, {"script": STATEMENTS[3] + "\n    def test_wrong(self): self.assertEqual(add(1, 1), 3)"}, 0.0),
    (ADD, {"script": STATEMENTS[3] + "\nif __name__ == '__main__': unittest.main()"}, 1.0),
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int", {"script": "assert P(1).x == 1"}, 1.0),
]  # fmt: skip
