"""Programs that claim a verdict that they did not earn, by name."""

# ruff: noqa: E501 a program reads best on one line

# Each claims that add(a, b) is a sum, and is wrong.
FORGE = {
    "prints that it passed": "print('OK'); print('passed'); print('5')\ndef add(a, b): return 0",
    "exits": "import sys; sys.exit(0)",
    "exits by the built-in function": "exit(0)",
    "quits when called": "def add(a, b): quit()",
    "exits hard": "import os; os._exit(0)",
    "exits when called": "import sys\ndef add(a, b): sys.exit(0)",
    "exits hard when called": "import os\ndef add(a, b): os._exit(0)",
    "exits by an exception": "def add(a, b): raise SystemExit(0)",
    "exits at the end": "import atexit, os; atexit.register(os._exit, 0)\ndef add(a, b): return 0",
    "execs something else": "import os, sys\ndef add(a, b): os.execv(sys.executable, ['python', '-c', 'pass'])",
    "kills itself": "import os\ndef add(a, b): os.kill(os.getpid(), 15)",
    "equals everything": "class Yes:\n    def __eq__(self, other): return True\n    __hash__ = None\ndef add(a, b): return Yes()",
    "equals everything as an int": "class Yes(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Yes(0)",
    "claims the class of an int": """
class Yes:
    __class__ = int
    def __eq__(self, other): return True
    def __int__(self): return 0
def add(a, b): return Yes()
""",
    "differs from nothing": """
class Yes(float):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
def add(a, b): return Yes('nan')
""",
    "mock": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "patches builtins": """
import builtins
for name in ('sum', 'len', 'all', 'any', 'abs', 'max', 'min'): setattr(builtins, name, lambda *_: 0)
builtins.isinstance = lambda *_: True
def add(a, b): return 0
""",
    "patches AssertionError": """
import builtins
class Never(Exception):
    def __new__(cls, *_): raise SystemExit(0)
builtins.AssertionError = Never
def add(a, b): return 0
""",
    "patches import": "import builtins\nbuiltins.__import__ = lambda *a, **k: None\ndef add(a, b): return 0",
    "hooks import": """
import importlib.abc, importlib.util, sys
class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None): return importlib.util.spec_from_loader(name, self)
    def exec_module(self, module): module.TestCase = object
sys.meta_path.insert(0, Finder())
def add(a, b): return 0
""",
    "patches unittest": """
import unittest
unittest.TestCase.assertEqual = unittest.TestCase.assertTrue = lambda *_: None
unittest.TestResult.wasSuccessful = lambda self: True
def add(a, b): return 0
""",
    "patches json": "import json\njson.dumps = lambda *_, **__: '5'[:0]\njson.JSONEncoder.encode = json.dumps\ndef add(a, b): return 0",
    "patches os": "import os\nos.write = os._exit = os.waitpid = lambda *_: 0\ndef add(a, b): return 0",
    "replaces the main module": "import sys, types\nsys.modules['__main__'] = types.ModuleType('x')\ndef add(a, b): return 0",
    "clears the modules": "import sys\nsys.modules.clear()\ndef add(a, b): return 0",
    "jumps over the asserts": """
import sys
def trace(frame, event, argument):
    try: frame.f_lineno = max(line for *_, line in frame.f_code.co_lines() if line)
    except ValueError: pass
    return trace
def add(a, b):
    sys.settrace(trace); sys._getframe(1).f_trace = trace; return 0
""",
    "writes to every descriptor": """
import os
for n in range(3, 64):
    for text in (b'true', b'OK', b'{}', b'1'):
        try: os.write(n, text)
        except OSError: pass
def add(a, b): os._exit(0)
""",
    "writes all that frames and the collector know": """
import gc, os, sys
def texts():
    for frame in sys._current_frames().values():
        while frame:
            yield from (repr(part) for part in (frame.f_locals, frame.f_globals)); frame = frame.f_back
    yield from map(repr, gc.get_objects())
def add(a, b):
    import re
    found = {text for part in texts() for text in re.findall('[0-9a-f]{64}', part)}
    for text in found or ['']:
        for n in range(3, 64):
            try: os.write(n, text.encode())
            except OSError: pass
    os._exit(0)
""",
    "asks the main interpreter": """
import os
def add(a, b):
    import _xxsubinterpreters as x
    x.run_string(x.get_main(), "import os, sys\\nframe = sys._getframe()\\nwhile frame:\\n  print(frame.f_locals)\\n  frame = frame.f_back")
    os._exit(0)
""",
    "reads the nonce in a thread": """
import os, sys, threading
def read():
    for frame in sys._current_frames().values():
        while frame:
            for text in map(str, frame.f_locals.values()):
                for n in range(3, 16):
                    try: os.write(n, text.encode())
                    except OSError: pass
            frame = frame.f_back
    os._exit(0)
def add(a, b): t = threading.Thread(target=read); t.start(); t.join(); return 0
""",
    "hands the nonces of later tests from one test to the next": """
import os, re, sys
frame = sys._getframe()
while frame:
    found = re.findall('[0-9a-f]{64}', repr([frame.f_locals, frame.f_globals])); frame = frame.f_back
    if found: open('/tmp/nonces', 'a').write(' '.join(found) + ' ')
if __name__ == 'program' and not hasattr(sys, 'settrace') and os.path.exists('/tmp/nonces'):
    done = open('/tmp/used', 'a').tell() if os.path.exists('/tmp/used') else 0
    open('/tmp/used', 'a').write('x')
    for n in range(3, 64):
        try: os.write(n, open('/tmp/nonces').read().split()[done].encode())
        except OSError: pass
    os._exit(0)
def add(a, b): return 0
""",
    "takes the verdict's pipe from frames of any interpreter": """
import os, sys
def add(a, b):
    for frame in sys._current_frames().values():
        while frame:
            test, end = frame.f_locals.get('test'), frame.f_locals.get('write_end')
            if isinstance(test, dict) and isinstance(end, int):
                os.write(end, str(test.get('nonce', 'passed')).encode()); os._exit(0)
            frame = frame.f_back
    return 0
""",
    "replaces what runs the test by way of all classes": """
for kind in object.__subclasses__():
    for function in list(vars(kind).values()):
        modules = getattr(getattr(function, '__globals__', {}).get('sys'), 'modules', {})
        for name in ('_xxsubinterpreters', 'services.reward.sandboxed.checker', 'services.reward.sandboxed.harness'):
            module = modules.get(name)
            for entry in ('run_string', 'check', '_load'):
                if hasattr(module, entry): setattr(module, entry, lambda *_, **__: None)
def add(a, b): return 0
""",
    "writes that it passed to every descriptor": """
import os
for n in range(1, 64):
    for text in (b'passed', b'{"value": "passed", "printed": ""}\\n'):
        try: os.write(n, text)
        except OSError: pass
def add(a, b): os._exit(0)
""",
    "gives itself out as a built-in": "add = type('int', (int,), {'__module__': 'builtins', '__eq__': lambda s, o: True, '__hash__': None, '__new__': lambda *_: 0})",
    "pretends in its operators": """
class Yes:
    def __getattr__(self, name): return lambda *_: True
    def __sub__(self, other): return 0
    __rsub__ = __abs__ = __float__ = __int__ = __index__ = __sub__
    def __eq__(self, other): return True
    __lt__ = __gt__ = __le__ = __ge__ = __eq__
    __hash__ = None
def add(a, b): return Yes()
""",
    "stops the loop of the test": "def add(a, b): raise StopIteration",
    "defines what the test compares with": "def sum(values): return 0\ndef add(a, b): return 0",
    "answers in a pickle": "import os, pickle\ndef add(a, b):\n    for n in range(3, 16):\n        try: os.write(n, pickle.dumps(print))\n        except OSError: pass\n    os._exit(0)",
    "writes what the harness would": """
import os
def add(a, b):
    for n in range(64):
        try: os.write(n, b'{"output": "5"}\\n' * 10)
        except OSError: pass
    os._exit(0)
""",
    "nested forever": "def add(a, b):\n    x = []\n    for _ in range(900): x = [x]\n    return x",
    "contains itself": "def add(a, b):\n    x = []; x.append(x); return x",
    "number of a million digits": "def add(a, b): return 10 ** 10 ** 6",
    "no number": "def add(a, b): return float('nan')",
    "text of 100 MB": "def add(a, b): return 'x' * (10 ** 8)",
    "endless list": "def add(a, b):\n    x = []\n    while True: x.append(0)",
    "result of its own class": "class Result:\n    def __repr__(self): return '5'\n    __str__ = __repr__\ndef add(a, b): return Result()",
    "has no such function": "def sub(a, b): return a - b",
    "function is a number": "add = 5",
    "hidden in getattr": "def __getattr__(name): return lambda *_: 0",
    "raises": "def add(a, b): raise ValueError(5)",
}


_FACTOR = "p = factor(91)\nassert 1 < p < 91 and 91 % p == 0"
_SORT = "r = order([3, 1, 2])\nassert all(r[i] <= r[i + 1] for i in range(len(r) - 1)) and sorted(r) == [1, 2, 3]"
_CHANGES = """
def change(kind, first, then, *names):
    def one(self, *_):
        self.n = getattr(self, 'n', 0) + 1
        return first if self.n < 3 else then
    return type('V', (kind,), dict.fromkeys(names, one))
"""

# Each is wrong, and would pass if a value could change between two questions, or if it answered each as it likes; or it
# would hide that a test has failed.
CHANGE = {
    "int that becomes another": (
        _CHANGES + "def factor(n): return change(int, 2, 1, '__int__', '__index__')(2)",
        _FACTOR,
    ),
    "int that becomes another under its function's name": (
        _CHANGES
        + "class factor(change(int, 2, 1, '__int__', '__index__')):\n    def __new__(cls, n): return super().__new__(cls, 2)",
        _FACTOR,
    ),
    "class under test that becomes another": (
        _CHANGES
        + "class Factor(change(int, 2, 1, '__int__', '__index__')):\n    def __new__(cls, n): return super().__new__(cls, 2)",
        _FACTOR.replace("factor", "Factor"),
    ),
    "float that becomes another": (_CHANGES + "def factor(n): return change(float, 2.0, 1.0, '__float__')(2)", _FACTOR),
    "forged class": (
        _CHANGES
        + "def factor(n):\n    v = change(object, 2, 1, '__int__', '__index__')\n    v.__class__ = property(lambda self: int)\n    return v()",
        _FACTOR,
    ),
    "operators of an int": (
        "class V(int):\n    __mod__ = __rmod__ = lambda *_: 0\n    __lt__ = __gt__ = lambda *_: True\ndef factor(n): return V(2)",
        _FACTOR,
    ),
    "operators of a class": (
        "class V:\n    __mod__ = __rmod__ = lambda *_: 0\n    __lt__ = __gt__ = lambda *_: True\ndef factor(n): return V()",
        _FACTOR,
    ),
    "property that becomes another": (
        "class V:\n    n = 0\n    @property\n    def x(self):\n        self.n += 1\n        return 2 if self.n < 3 else 1\ndef factor(n): return V()",
        "p = factor(91)\nassert 1 < p.x < 91 and 91 % p.x == 0",
    ),
    "nested value": (
        _CHANGES + "def factor(n): return [{'p': change(int, 2, 1, '__int__', '__index__')(2)}]",
        "p = factor(91)\nassert 1 < p[0]['p'] < 91 and 91 % p[0]['p'] == 0",
    ),
    "text that becomes another": (
        _CHANGES + "def f(): return change(str, 'ab', 'ba', '__str__')('ab')",
        "p = f()\nassert p.startswith('a') and p[::-1] == p",
    ),
    "text whose length and characters differ": (
        "class V(str):\n    __len__ = lambda _: 5\n    __getitem__ = lambda s, i: 'x'\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\ndef f(): return V('ab')",
        "p = f()\nassert len(p) == 5 and p[0] == p[-1]",
    ),
    "number whose text differs": (
        "class V(int):\n    __str__ = __repr__ = lambda _: '101'\ndef f(): return V(123)",
        "p = f()\nassert p > 100 and str(p) == str(p)[::-1]",
    ),
    "bytes that become others": (
        _CHANGES + "def f(): return change(bytes, b'ab', b'ba', '__bytes__', '__iter__')(b'ab')",
        "p = f()\nassert p[0] == 97 and p == p[::-1]",
    ),
    "list with two readings": ("class V(list):\n    __getitem__ = lambda s, i: 0\ndef order(x): return V(x)", _SORT),
    "list with a short length": ("class V(list):\n    __len__ = lambda s: 1\ndef order(x): return V(x)", _SORT),
    "tuple with two readings": ("class V(tuple):\n    __getitem__ = lambda s, i: 0\ndef order(x): return V(x)", _SORT),
    "iterator that changes": (
        "class V(list):\n    n = 0\n    def __iter__(self):\n        self.n += 1\n        return iter([1, 2, 3] if self.n % 2 else [3, 2, 1])\ndef order(x): return V(x)",
        "r = order([3, 1, 2])\nassert list(r) == sorted(r) and list(r) == sorted(r)",
    ),
    "own class with two readings": (
        "class V:\n    __len__ = lambda s: 3\n    __iter__ = lambda s: iter([3, 1, 2])\n    __getitem__ = lambda s, i: 0\ndef order(x): return V()",
        _SORT,
    ),
    "own class whose iteration changes": (
        "class V:\n    n = 0\n    __len__ = lambda s: 3\n    def __iter__(self):\n        self.n += 1\n        return iter([1, 2, 3] if self.n % 2 else [3, 1, 2])\ndef order(x): return V()",
        "r = order([3, 1, 2])\nassert sorted(r) == [1, 2, 3] and list(r) == [1, 2, 3] and list(r) == sorted(r) and [*r] != [3, 1, 2] and r == 0 or list(r) == [1, 2, 3] and r[0] == 3",
    ),
    "dict with two readings": (
        "class V(dict):\n    __len__ = lambda s: 2\n    __missing__ = lambda s, k: 1\n    __contains__ = lambda *_: True\ndef f(): return V()",
        "r = f()\nassert len(r) == 2 and 'a' in r and r['a'] == 1",
    ),
    "set with two readings": (
        "class V(set):\n    __len__ = lambda s: 2\n    __contains__ = lambda *_: True\ndef f(): return V()",
        "r = f()\nassert len(r) == 2 and 5 in r",
    ),
    "hash of another": (
        "class V(int):\n    __hash__ = lambda _: hash(5)\n    __eq__ = lambda *_: True\ndef f(): return V(4)",
        "assert f() in {5}",
    ),
    "truth of another": (
        "class V(int):\n    __bool__ = lambda _: True\ndef f(): return V(0)",
        "r = f()\nassert r and r == 0",
    ),
    "product of a float": (
        "class V(float):\n    __mul__ = lambda *_: 2.0\ndef root(x): return V(1)",
        "r = root(2)\nassert abs(r * r - 2) < 1e-6",
    ),
    "product of a class": (
        "class V:\n    __mul__ = lambda *_: 2.0\ndef root(x): return V()",
        "r = root(2)\nassert abs(r * r - 2) < 1e-6",
    ),
    "product of a class that is called as a function": (
        "class root:\n    def __init__(self, x): pass\n    __mul__ = lambda *_: 2.0",
        "r = root(2)\nassert abs(r * r - 2) < 1e-6",
    ),
    "product of what a method returns": (
        "class Solution:\n    def root(self, x): return self\n    __mul__ = lambda *_: 2.0",
        "r = Solution().root(2)\nassert abs(r * r - 2) < 1e-6",
    ),
    "product of a nested value": (
        "class V(float):\n    __mul__ = lambda *_: 2.0\ndef root(x): return [V(1)]",
        "(r,) = root(2)\nassert abs(r * r - 2) < 1e-6",
    ),
    "sum of two values": (
        "class V:\n    __add__ = __radd__ = lambda *_: 5\ndef f(x): return V()",
        "assert f(1) + f(2) == 5",
    ),
    "equal lists": ("class V(list):\n    __eq__ = lambda *_: True\ndef f(x): return V([x])", "assert f(1) == f(2)"),
    "raises in a with": (
        "class C:\n    __enter__ = lambda s: s\n    __exit__ = lambda *_: None\n    def get(self): raise ValueError(5)\ndef ctx(): return C()",
        "with ctx() as c:\n    assert c.get() == 5",
    ),
    "suppresses a failed assert": (
        "class C:\n    __enter__ = lambda s: s\n    __exit__ = lambda *_: True\n    get = lambda s: 4\ndef ctx(): return C()",
        "with ctx() as c:\n    assert c.get() == 5",
    ),
    "suppresses before an assert": (
        "class C:\n    __enter__ = lambda s: s\n    __exit__ = lambda *_: True\n    def get(self): raise ValueError(5)\ndef ctx(): return C()",
        "with ctx() as c:\n    x = c.get()\n    assert x == 5",
    ),
    "suppresses a failed check of unittest": (
        "class C:\n    __enter__ = lambda s: s\n    __exit__ = lambda *_: True\n    get = lambda s: 4\ndef ctx(): return C()",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        with ctx() as c: self.assertEqual(c.get(), 5)",
    ),
    "skips a test case": (
        "import unittest\ndef f(x): raise unittest.SkipTest('x')",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
    ),
    "skips a test case with a class of its own": (
        "import unittest\nclass Skip(unittest.SkipTest): pass\ndef f(x): raise Skip",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
    ),
    "stops a test case": (
        "import unittest.case\ndef f(x): raise unittest.case._ShouldStop",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(1), 2)",
    ),
    "raises in place of a failed assert": (
        "class C:\n    __enter__ = lambda s: s\n    def __exit__(self, *_): raise KeyError\n    get = lambda s: 4\ndef ctx(): return C()",
        "try:\n    with ctx() as c:\n        assert c.get() == 5\nexcept KeyError: pass",
    ),
    "gives a module to a callback": ("import os\ndef each(f): return f(os)", "assert each(lambda x: x) == 5"),
    "gives an attribute of a module to a callback": (
        "import os\ndef each(f): return f(os)",
        "assert each(lambda x: x.environ) == 5",
    ),
    "gives itself to a callback": (
        "import sys\ndef each(f): return f(sys.modules['program'])",
        "assert each(lambda x: x) == 5",
    ),
    "gives a frame to a callback": (
        "import sys\ndef each(f): return f(sys._getframe())",
        "assert each(lambda x: [x, len]) == 5",
    ),
    "raises a module": (
        "import os\ndef f(): raise ValueError(os, print)",
        "try: f()\nexcept ValueError as e: f(e.args)",
    ),
    "swallows what a callback raises": (
        "def each(f, x):\n    try: f(0)\n    except BaseException: pass",
        "def check(x): assert x == 5\neach(check, 5)",
    ),
    "swallows a check of unittest in a callback": (
        "def each(f, x):\n    try: f(0)\n    except BaseException: pass",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): each(lambda x: self.assertEqual(x, 5), 5)",
    ),
    "formats an object of the test": (
        "def f(n): return n.val.format(n)",
        "class Node:\n    val = '{0.__class__.__init__.__globals__}'\nassert 'check' in f(Node())\ncheck = 1",
    ),
    "reads what an object of the test knows": (
        "def f(n):\n    try: return n.get.__globals__['secret']\n    except AttributeError: return n.__init__.__func__.__globals__['secret']",
        "import secrets\nsecret = secrets.token_hex()\nclass Node:\n    def get(self): return 5\nassert f(Node()) == secret",
    ),
    "reads the frame of a generator of the test": (
        "def f(g): return g.gi_frame.f_globals['secret']",
        "import secrets\nsecret = secrets.token_hex()\nassert f(x for x in [1]) == secret",
    ),
    "replaces a method of the test's class": (
        "def f(n):\n    type(n).same = n.same = lambda *_: True\n    return 4",
        "class Node:\n    def __eq__(self, other): return other == 5\nassert Node() == f(Node())",
    ),
}
