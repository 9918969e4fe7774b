"""What the workers of these tests run."""

import contextlib
import ctypes
import os
import platform
import random
import sys
import time

import numpy as np

from embodyrl.placement.startup_lock import one_at_a_time


class Service:
    """Answers, waits and fails on command."""

    def __init__(self, number):
        self.number = number

    def echo(self, value):
        return value

    def slow_echo(self, value, seconds):
        time.sleep(seconds)
        return value

    def generator(self):
        return (number for number in range(3))

    def fail(self, text):
        raise KeyError(text)

    def hang(self):
        time.sleep(1000)

    def read(self, fd):
        text = os.pread(fd, 100, 0)
        os.close(fd)
        return text

    def environment(self, name):
        return os.environ.get(name)

    def cpus(self):
        return sorted(os.sched_getaffinity(0))

    def memory_policy(self):
        """Mode and node mask of this process's memory policy, as the kernel tells it."""
        mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
        number = {"x86_64": 239, "aarch64": 236}[platform.machine()]
        assert ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, 1024, None, 0) == 0
        return mode.value, [bit for bit in range(1024) if mask[bit // 64] >> bit % 64 & 1]

    def modules(self):
        return list(sys.modules)

    def parent(self):
        return os.getppid()

    def descriptors(self):
        """What this process has open, without the listing's own descriptor."""
        links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        return sorted(os.readlink(link).split(":")[0] for link in links if os.path.lexists(link))

    def random_numbers(self):
        return random.random(), float(np.random.random())

    def read_stdin(self):
        return input("which folder? ")

    def take_turn(self, seconds):
        """When a turn of this length began and ended (a clock that all processes share)."""
        with one_at_a_time("rehearse"):
            began = time.monotonic()
            time.sleep(seconds)
            return began, time.monotonic()

    def keep_turn(self):
        """Take a turn and return in the middle of it."""
        self.turn = one_at_a_time("rehearse")
        self.turn.__enter__()

    def leave(self, code):
        print("out of here")
        print("for good", file=sys.stderr)
        os._exit(code)

    def hang_up(self):
        """Close the control line and stay."""
        os.closerange(3, 100)
        time.sleep(1000)

    def close_descriptors(self):
        """Close all but the usual three, as a careless daemon does."""
        os.closerange(3, 100)

    def write_everywhere(self, data):
        """Write to every descriptor but the usual three."""
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2:
                with contextlib.suppress(OSError):
                    os.write(int(name), data)

    def start_a_child(self):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        return child

    def _hidden(self):
        return "seen"


class Notified(Service):
    """Does on a notification what it was told to before."""

    def prepare(self, method, *args):
        self.prepared = method, args

    def on_notify(self):
        method, args = self.prepared
        getattr(self, method)(*args)


class SlowToClose(Service):
    def close(self):
        time.sleep(1000)


class MarksItsEnd(Service):
    def close(self):
        with open(self.number, "w") as file:
            file.write("closed")
