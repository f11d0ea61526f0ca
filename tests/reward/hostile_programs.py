"""Programs that attack the sandbox or the verdict, by name.

CANARY, PID, ADDRESS, PORT and SOCKET stand for what lies outside: a file, the reward service's process, the secret in
its memory, and a TCP port and a UNIX socket that hand it out. Every STEAL program prints the secret if it gets it, every BREAK program prints WON if
it gets through; as the secret or WON is the expected output of their test, each would pass if its attack worked.
"""

# ruff: noqa: E501 a program reads best on one line

_SYSCALL = """
import ctypes, os
_libc = ctypes.CDLL(None, use_errno=True)
def syscall(*arguments):
    result = _libc.syscall(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result < 0: raise OSError(ctypes.get_errno(), "refused")
    return result
"""

_FIND = """
import re
def find(data):
    data = data if isinstance(data, bytes) else str(data).encode(errors="replace")
    for match in re.findall(rb"SECRET-[0-9a-f]{32}", data): print(match.decode())
"""

STEAL = {
    "file by its path": "print(open('CANARY').read())",
    "file by a relative path": "print(open('../' * 20 + 'CANARY').read())",
    "file by a symlink": "import os; os.symlink('CANARY', 'link'); print(open('link').read())",
    "file by a hard link": "import os; os.link('CANARY', 'link'); print(open('link').read())",
    "file by the root of process 1": "print(open('/proc/1/root/CANARY').read())",
    "file by the working directory of the parent": "import os; print(open(f'/proc/{os.getppid()}/cwd/CANARY').read())",
    "file by leaving a chroot": "import os; os.mkdir('x'); os.chroot('x'); os.chdir('../' * 20); print(open('CANARY').read())",
    "file by a descriptor of the root": (
        "import os; d = os.open('/', os.O_RDONLY); os.fchdir(d); os.chdir('../..'); print(open('.CANARY').read())"
    ),
    "file by mounting": _SYSCALL
    + "os.mkdir('m'); syscall(165, b'/', b'm', b'none', 4096, None); print(open('mCANARY').read())",
    "file by its handle": _SYSCALL
    + """
h = ctypes.create_string_buffer(b'\\x08\\0\\0\\0\\x01\\0\\0\\0\\x02\\0\\0\\0\\0\\0\\0\\0', 136)
d = syscall(304, os.open('/', os.O_RDONLY), h, 0); os.fchdir(d); print(open('.CANARY').read())
""",
    "file by walking the tree": """
import os
for folder, _, files in os.walk('/'):
    for name in files:
        if name == os.path.basename('CANARY'): print(open(os.path.join(folder, name)).read())
""",
    "own environment": "import os; print(os.environ['LOCKSTEP_TEST_SECRET'])",
    "environment by getenv": _SYSCALL
    + "_libc.getenv.restype = ctypes.c_char_p; print(_libc.getenv(b'LOCKSTEP_TEST_SECRET').decode())",
    "environment of process 1": _FIND + "find(open('/proc/1/environ', 'rb').read())",
    "environment of the parent": _FIND + "import os; find(open(f'/proc/{os.getppid()}/environ', 'rb').read())",
    "environment of the service": _FIND + "find(open('/proc/PID/environ', 'rb').read())",
    "environment by mounting proc": _SYSCALL
    + _FIND
    + "os.mkdir('p'); syscall(165, b'proc', b'p', b'proc', 0, None); find(open('p/1/environ', 'rb').read())",
    "memory of the service": _SYSCALL
    + _FIND
    + """
data = ctypes.create_string_buffer(4096)
class Vector(ctypes.Structure): _fields_ = [('base', ctypes.c_void_p), ('length', ctypes.c_size_t)]
mine, theirs = Vector(ctypes.addressof(data), 64), Vector(ADDRESS, 64)
syscall(310, PID, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0); find(data.raw)
""",
    "memory of the service by proc": _FIND + "f = open('/proc/PID/mem', 'rb', 0); f.seek(ADDRESS); find(f.read(64))",
    "every open descriptor": """
import os
for descriptor in range(3, 1024):
    try: os.lseek(descriptor, 0, 0)
    except OSError: pass
    try: print(os.read(descriptor, 1 << 20).decode(errors='replace'))
    except OSError: pass
""",
    "descriptors of the harness": _SYSCALL
    + """
p = os.pidfd_open(os.getppid())
for n in range(64):
    try: print(os.read(syscall(438, p, n, 0), 1 << 20))
    except BlockingIOError: pass
""",
    "expected output in frames": _FIND
    + """
import sys
frame = sys._getframe()
while frame: find(repr(frame.f_locals)); frame = frame.f_back
""",
    "expected output by the garbage collector": _FIND
    + """
import gc
for thing in gc.get_objects():
    if type(thing) in (dict, list, tuple): find(repr([t for t in (thing.values() if type(thing) is dict else thing) if type(t) is str]))
""",
    "expected output in the arguments": _FIND + "import sys; find(repr(sys.argv + sys.orig_argv))",
    "expected output in own memory": _SYSCALL
    + _FIND
    + "f = open('/proc/self/mem', 'rb', 0); f.seek(id(f)); find(f.read(1 << 20))",
    "TCP port of the host": """
import socket
s = socket.create_connection(('127.0.0.1', PORT), 1); print(s.recv(99).decode())
""",
    "TCP port by asyncio": """
import asyncio
async def main():
    reader, _ = await asyncio.open_connection('127.0.0.1', PORT); print((await reader.read(99)).decode())
asyncio.run(main())
""",
    "TCP port by urllib": "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:PORT').read().decode())",
    "UNIX socket": """
import socket
s = socket.socket(socket.AF_UNIX); s.connect('SOCKET'); print(s.recv(99).decode())
""",
    "abstract UNIX socket": """
import socket
s = socket.socket(socket.AF_UNIX); s.connect('\\0SOCKET'); print(s.recv(99).decode())
""",
    "socket made by socketpair": """
import socket
a, _ = socket.socketpair(); a.connect('\\0SOCKET'); print(a.recv(99).decode())
""",
}

BREAK = {
    "reads /etc/passwd": "open('/etc/passwd'); print('WON')",
    "reads the home of root": "import os; os.listdir('/root/.ssh'); print('WON')",
    "resolves a name": "import socket; socket.getaddrinfo('example.org', 80); print('WON')",
    "opens a UDP socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)); print('WON')",
    "opens a raw socket": "import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1); print('WON')",
    "opens a packet socket": "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('WON')",
    "opens a netlink socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); print('WON')",
    "opens a vsock to the hypervisor": "import socket; socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); print('WON')",
    "fork bomb": "import os\nwhile True: os.fork()",
    "fork bomb of sessions that ignore signals": """
import os, signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: pass
""",
    "500 processes": "import os, time\nfor _ in range(500):\n    if os.fork() == 0: time.sleep(60)\nprint('WON')",
    "500 threads": """
import threading, time
threading.stack_size(65536)
for _ in range(500): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print('WON')
""",
    "memory bomb": "x = bytearray(8 << 30); print('WON')",
    "slow memory bomb": "x = []\nwhile len(x) < 8192: x.append(bytearray(1 << 20))\nprint('WON')",
    "memory by mmap": "import mmap; m = [mmap.mmap(-1, 1 << 30) for _ in range(8)]; print('WON')",
    "memory by a huge integer": "x = 1 << (1 << 36); print('WON')",
    "memory by memfd": "import os; f = os.memfd_create('x'); print('WON')",
    "memory by System V": _SYSCALL + "syscall(29, 0, 1 << 30, 0o1600); print('WON')",
    "memory by message queues": _SYSCALL + "syscall(68, 0, 0o1600); print('WON')",
    "locks memory": _SYSCALL + "b = ctypes.create_string_buffer(1 << 20); syscall(149, b, 1 << 20); print('WON')",
    "fills the disk": "f = open('x', 'wb')\nfor _ in range(8192): f.write(bytes(1 << 20))\nf.close(); print('WON')",
    "fills the disk with many files": """
for n in range(1024):
    with open(str(n), 'wb') as f: f.write(bytes(1 << 20))
print('WON')
""",
    "reserves the disk": "import os; os.posix_fallocate(os.open('x', os.O_CREAT | os.O_RDWR), 0, 1 << 33); print('WON')",
    "opens 1000 files": "f = [open('/dev/null') for _ in range(1000)]; print('WON')",
    "writes the root": "open('/x', 'w'); print('WON')",
    "writes /dev/shm": "open('/dev/shm/x', 'w'); print('WON')",
    "makes a folder in /dev": "import os; os.mkdir('/dev/x'); print('WON')",
    "writes the standard library": "import os; open(os.__file__, 'a'); print('WON')",
    "writes the C library's folder": "open('/usr/lib/x', 'w'); print('WON')",
    "removes the harness": "import os; os.remove('/code/services/reward/sandboxed/harness.pyc'); print('WON')",
    "changes the mode of the root": "import os; os.chmod('/usr', 0o777); print('WON')",
    "writes the canary": "open('CANARY', 'w').write('changed'); print('WON')",
    "writes the canary by the kernel's proc": "open('/proc/sys/kernel/core_pattern', 'w').write('|CANARY'); print('WON')",
    "makes a block device": "import os, stat; os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(8, 0)); open('d'); print('WON')",
    "makes a character device": "import os, stat; os.mknod('d', 0o600 | stat.S_IFCHR, os.makedev(1, 1)); open('d'); print('WON')",
    "opens the kernel's memory": "open('/dev/mem'); print('WON')",
    "opens a terminal": "open('/dev/tty'); print('WON')",
    "makes a terminal": "import os; os.openpty(); print('WON')",
    "types into a terminal": "import fcntl, termios; [fcntl.ioctl(0, termios.TIOCSTI, c) for c in 'id']; print('WON')",
    "kills the service": "import os; os.kill(PID, 9); print('WON')",
    "signals the service": "import os; os.kill(PID, 0); print('WON')",
    "signals the service by a pidfd": "import os; os.pidfd_open(PID); print('WON')",
    "kills everything": "import os, time; os.kill(-1, 9); time.sleep(1e6)",
    "kills its parent": "import os\nfor n in range(1, 65): os.kill(os.getppid(), n)\nif os.getppid() != 1: print('WON')",
    "stops its parent": "import os, signal, time; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1e6)",
    "kills its group": "import os; os.killpg(0, 9); print('WON')",
    "traces its parent": _SYSCALL + "syscall(101, 16, os.getppid(), 0, 0); print('WON')",
    "writes its parent's memory": "import os; open(f'/proc/{os.getppid()}/mem', 'r+b'); print('WON')",
    "makes a user namespace": _SYSCALL + "syscall(272, 0x10000000); print('WON')",
    "clones into a user namespace": _SYSCALL + "syscall(56, 0x10000011, 0, 0, 0, 0); print('WON')",
    "clones by clone3": _SYSCALL + "a = (ctypes.c_uint64 * 8)(0x10000000); syscall(435, a, 64); print('WON')",
    "makes a mount namespace": _SYSCALL + "syscall(272, 0x20000); print('WON')",
    "joins a namespace": _SYSCALL + "syscall(308, os.pidfd_open(1), 0x20000); print('WON')",
    "mounts": _SYSCALL + "os.mkdir('m'); syscall(165, b'tmpfs', b'm', b'tmpfs', 0, None); print('WON')",
    "mounts by fsopen": _SYSCALL + "syscall(430, b'tmpfs', 0); print('WON')",
    "unmounts": _SYSCALL + "syscall(166, b'/tmp', 2); print('WON')",
    "pivots the root": _SYSCALL + "os.mkdir('m'); syscall(155, b'.', b'm'); print('WON')",
    "becomes root": "import os; os.setuid(0); print('WON')",
    "becomes another user": "import os; os.setresuid(1, 1, 1); print('WON')",
    "changes its groups": "import os; os.setgroups([0]); print('WON')",
    "runs a shell": "import subprocess; subprocess.run(['/bin/sh', '-c', 'true'], check=True); print('WON')",
    "runs su": "import os; os.execv('/usr/bin/su', ['su', '-c', 'echo WON'])",
    "raises its limits": "import resource as r; r.setrlimit(r.RLIMIT_NPROC, (4096, 4096)); print('WON')",
    "raises its priority": "import os; os.nice(-5); print('WON')",
    "takes real-time priority": "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(50)); print('WON')",
    "renames the host": "import socket; socket.sethostname('x'); print('WON')",
    "sets the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, 0); print('WON')",
    "reboots": _SYSCALL + "syscall(169, 0xfee1dead, 672274793, 0x89abcdef, 0); print('WON')",
    "io_uring": _SYSCALL + "syscall(425, 8, ctypes.create_string_buffer(120)); print('WON')",
    "bpf": _SYSCALL + "syscall(321, 0, ctypes.create_string_buffer(72), 72); print('WON')",
    "perf_event_open": _SYSCALL + "syscall(298, ctypes.create_string_buffer(b'\\1', 112), 0, -1, -1, 0); print('WON')",
    "userfaultfd": _SYSCALL + "syscall(323, 1); print('WON')",
    "reads the session's keys": _SYSCALL + "syscall(250, 0, -3, 0); print('WON')",
    "adds a key": _SYSCALL + "syscall(248, b'user', b'x', b'y', 1, -3); print('WON')",
    "calls by the 32-bit interface's numbers": _SYSCALL + "syscall(0x40000000 + 41, 2, 1, 0); print('WON')",
    "loops forever": "while True: pass",
    "sleeps forever": "import time; time.sleep(1e6); print('WON')",
    "prints forever": "while True: print('WON' * 1000)",
    "prints forever to stderr": "import sys\nwhile True: sys.stderr.write('WON' * 1000)",
    "reads forever": "while True: open('/dev/zero', 'rb').read(1 << 20)",
    "ignores every signal": """
import signal
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "closes its output and goes on": "import os, time\nfor n in range(64):\n    try: os.close(n)\n    except OSError: pass\ntime.sleep(1e6)",
    "never joins a thread": "import threading, time; threading.Thread(target=time.sleep, args=(1e6,)).start(); print('WON')",
    "never ends its exit": "import atexit, time; atexit.register(time.sleep, 1e6); print('WON')",
    "recurses forever": "import sys; sys.setrecursionlimit(1 << 30)\ndef f(): return f()\nf(); print('WON')",
    "overflows the C stack": "x = []\nfor _ in range(10 ** 6): x = [x]\nrepr(x); print('WON')",
    "crashes": "import ctypes; ctypes.string_at(1); print('WON')",
    "regular expression of exponential time": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b'); print('WON')",
    "prints right and exits wrong": "import sys; print('WON'); sys.exit(1)",
    "prints right and raises": "print('WON'); raise ValueError",
    "prints right and kills itself": "import os; print('WON', flush=True); os.kill(os.getpid(), 9)",
    "is no Python": "this is no Python",
    "has a null byte": "print('W\0ON')",
    "has a lone surrogate": "print('\ud800')",
    "is empty": "",
}

# They print WON by rights, and leave something behind that has to go with them.
LEAVE = {
    "a child": "import os, time\nif os.fork() == 0: time.sleep(1e6)\nprint('WON')",
    "a daemon": """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for n in range(64):
            try: os.close(n)
            except OSError: pass
        time.sleep(1e6)
    os._exit(0)
os.wait(); print('WON')
""",
    "ten stopped children": """
import os, signal
for _ in range(10):
    if os.fork() == 0: os.kill(os.getpid(), signal.SIGSTOP)
print('WON')
""",
    "zombies": "import os, time\nfor _ in range(10):\n    if os.fork() == 0: os._exit(0)\ntime.sleep(0.1); print('WON')",
    "files": "import os\nfor n in range(1000): open(f'/tmp/{n}', 'w')\nprint('WON')",
    "files that its next test must not see": """
import os
os.makedirs('/tmp/a/b'); os.symlink('/usr', '/tmp/a/link'); open('/tmp/a/b/once', 'x')
print('WON' if os.listdir('/tmp') == ['a'] else 'seen')
""",
}
