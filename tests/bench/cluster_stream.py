"""A TCP stream without end: `receive ADDRESS PORT FILE` counts into a file, `send ADDRESS PORT` sends."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from time import sleep


def receive(address: str, port: str, file: str) -> None:
    """Take what comes."""
    received = 0
    with socket.create_server((address, int(port))) as server:
        Path(file).write_text("0")
        connection, _ = server.accept()
        while piece := connection.recv(1 << 16):
            received += len(piece)
            Path(f"{file}.new").write_text(str(received))
            Path(f"{file}.new").replace(file)


def send(address: str, port: str) -> None:
    """Send little by little, so that the machine stays free for others."""
    with socket.create_connection((address, int(port))) as connection:
        while True:
            connection.sendall(bytes(10_000))
            sleep(0.005)


{"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
