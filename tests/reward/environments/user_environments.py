"""Environments of a user, good and bad; workers import this file by name."""

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import sqlite3
import threading
import time
from pathlib import Path


def keep_the_interpreter():
    """Never returns, and lets no other thread run meanwhile, as a regular expression may; but takes no time."""
    mutex, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    while True:
        libc.pthread_mutex_lock(mutex)  # the second time it waits for itself


class Guess:
    """The ten lines of docs/environments.md."""

    def __init__(self, top=10):
        self.top = top

    def reset(self, seed, row):
        self.number = random.Random(seed).randint(1, self.top)
        return f"Guess my number, from 1 to {self.top}."

    def step(self, text):
        if int(text) == self.number:
            return None, 1.0, True
        return "higher" if int(text) < self.number else "lower", 0.0, False


class Journal:
    """Appends what it is asked to row["journal"], a file; `close` too."""

    def reset(self, seed, row):
        self.file = Path(row["journal"])
        self._write(f"reset {seed}")
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": "?"}]

    def step(self, text):
        self._write(f"step {text}")
        return {"observation": text.upper(), "reward": len(text), "done": text == "done"}

    def close(self):
        self._write("close")

    def _write(self, line):
        with self.file.open("a") as file:
            file.write(line + "\n")


class AsyncJournal(Journal):
    """Waits in each step for the file that it is told to create: never, for an empty name."""

    async def reset(self, seed, row):
        return super().reset(seed, row)

    async def step(self, text):
        await asyncio.sleep(0)
        if text == "hang":
            self._write("hanging")
            await asyncio.Event().wait()
        return super().step(text)

    async def close(self):
        super().close()


class Actor:
    """Does what row["reset"], the policy's text and row["close"] say."""

    def reset(self, seed, row):
        self.row = row
        return self._act(row.get("reset", ""), "ready")

    def step(self, text):
        return self._act(text, ("next", 0.5, False))

    def close(self):
        self._act(self.row.get("close", ""), None)

    def _act(self, what, default):
        return getattr(self, what)() if what else default

    def raises(self):
        raise KeyError("column")

    def stops_iterating(self):
        raise StopIteration

    def leaves(self):
        raise SystemExit(3)

    def exits(self):
        os._exit(3)

    def hangs(self):
        Path(self.row["file"]).touch()
        while True:
            time.sleep(1)

    def stalls(self):
        Path(self.row["file"]).touch()
        keep_the_interpreter()

    def prints(self):
        for _ in range(1000):
            print("x" * 1000)  # noqa: T201
        return "printed", 0.0, False

    def floods(self):
        while True:
            os.write(4, bytes(1 << 16))  # where the worker keeps its end of the pipe

    def answers_nonsense(self):
        os.write(4, b"1.0 is it\n")
        time.sleep(600)

    def answers_another(self):
        os.write(4, b'{"id": 12345, "messages": []}\n')
        time.sleep(600)

    def takes_memory(self):
        return len(bytearray(8 << 30))

    def is_long(self):
        return "x" * (5 << 20), 0.0, False

    def is_a_number(self):
        return 1.0

    def has_a_reward_that_is_not_finite(self):
        return None, float("nan"), False

    def has_a_reward_that_is_text(self):
        return None, "1.0", False

    def lies_about_done(self):
        return None, 1.0, "no"

    def is_of_numpy(self):
        import numpy as np

        return np.str_("won"), np.array([3, 3]).all(), np.bool_(True)

    def has_no_role(self):
        return [{"content": "?"}], 0.0, False

    def has_a_wrong_role(self):
        return [{"role": "assistant", "content": "I won"}], 0.0, False

    def is_no_text(self):
        return "\ud800", 0.0, False


class AsyncActor(Actor):
    """The same on the event loop."""

    async def reset(self, seed, row):
        return super().reset(seed, row)

    async def step(self, text):
        if text == "waits":
            await asyncio.Event().wait()
        if text == "will_not_be_canceled":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        return super().step(text)


class OnlyTools(Actor):
    """Sends results of tools only."""

    roles = ("tool",)


class WrongRoles(OnlyTools):
    """Names a role that no environment may send."""

    roles = ("assistant",)


class Unprepared:
    """Cannot be set up."""

    @classmethod
    def prepare(cls):
        raise RuntimeError("no corpus")

    def reset(self, seed, row):
        pass

    def step(self, text):
        pass


class NoStep:
    """Lacks a method."""

    def reset(self, seed, row):
        pass


class TakesNoRow(Guess):
    """Has a reset without the row."""

    def reset(self, seed):
        pass


class TakesNoText(Guess):
    """Has a step without the policy's text."""

    def step(self):
        pass


class Harmful:
    """Ends after `turns` turns of `step_s` seconds. Does `how` in the method `where`, if the row is one of `rows`."""

    def __init__(self, rows, how, where="step", turns=2, step_s=0.0):
        self.rows, self.how, self.where, self.turns, self.step_s = rows, how, where, turns, step_s

    def reset(self, seed, row):
        self.row = row["prompt"]
        self._harm("reset")

    def step(self, text):
        time.sleep(self.step_s)
        self._harm("step")
        self.turns -= 1
        return [{"role": "", "content": "7"}], 0.5, not self.turns

    def close(self):
        self._harm("close")

    def _harm(self, method):
        if method == self.where and self.row in self.rows:
            getattr(self, self.how)()

    def sleeps(self):
        threading.Event().wait()

    def queries(self):
        endless = "with recursive c(x) as (select 1 union all select x + 1 from c) select count(*) from c"
        sqlite3.connect(":memory:").execute(endless).fetchall()

    def spins(self):
        while True:
            pass

    def stalls(self):
        keep_the_interpreter()

    def exits(self):
        os._exit(3)

    def segfaults(self):
        ctypes.string_at(0)

    def is_killed(self):
        os.kill(os.getpid(), signal.SIGKILL)


class AsyncHarmful(Harmful):
    """The same on the event loop, which a `how` that does not await blocks."""

    async def step(self, text):
        await asyncio.sleep(0)
        return super().step(text)


class OneThread:
    """Uses what stays with the thread that made it."""

    made = threading.local()

    def __init__(self):
        OneThread.made.by = self
        self.loop = asyncio.new_event_loop()

    def reset(self, seed, row):
        self.file = row["file"]
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table seen (text)")
        self.counts = self._count()

    def step(self, text):
        self.database.execute("insert into seen values (?)", [text])
        assert OneThread.made.by is self, "no other episode has this thread"
        number = self.loop.run_until_complete(asyncio.sleep(0, next(self.counts)))
        seen = [text for (text,) in self.database.execute("select text from seen")]
        return f"{number} {' '.join(seen)}", 0.0, False

    def close(self):
        self.database.close()
        self.loop.close()
        Path(self.file).write_text("closed")

    def _count(self):
        yield from range(100)
