"""Start a Python program in a new network whose loopback device is still down: `python network.py ARGUMENTS...`."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys

SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40


def main() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP | IFF_RUNNING))
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])


if __name__ == "__main__":
    main()
