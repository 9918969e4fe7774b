"""What the workers of these tests run."""

import os
import sys
import time


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

    def leave(self, code):
        print("out of here")
        print("for good", file=sys.stderr)
        os._exit(code)

    def hang_up(self):
        """Close the control line and stay."""
        os.closerange(3, 100)
        time.sleep(1000)

    def start_a_child(self):
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        return child

    def _hidden(self):
        return "seen"


class SlowToClose(Service):
    def close(self):
        time.sleep(1000)


class MarksItsEnd(Service):
    def close(self):
        with open(self.number, "w") as file:
            file.write("closed")
