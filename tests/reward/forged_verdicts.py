"""Programs that claim a verdict that they did not earn, by name."""

# ruff: noqa: E501 a program reads best on one line

# Each claims that add(a, b) is a sum, and is wrong.
FORGE = {
    "prints that it passed": "print('OK'); print('passed'); print('5')\ndef add(a, b): return 0",
    "exits": "import sys; sys.exit(0)",
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
        for name in ('_xxsubinterpreters', 'services.reward.inside.checker', 'services.reward.inside.harness'):
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
