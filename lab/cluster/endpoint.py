"""One end of a measured connection, on a host of a cluster: python endpoint.py, or its functions.

It reads tasks from standard input, one per line, and answers each with a number.
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 29500
SKIPPED_S, COUNTED_S = (
    0.2,
    1.0,
)  # seconds: TCP needs the first to reach full speed; the second is measured
NUM_PINGS = 200


def receive(listener: socket.socket) -> float:
    """Accept a connection and return the bits per second of TCP payload that it brings."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(1)
        _rate(connection, SKIPPED_S)
        return _rate(connection, COUNTED_S)


def send(address: str) -> None:
    """Send to `address` until it closes the connection."""
    with socket.create_connection((address, PORT)) as connection:
        data = bytes(1 << 20)
        try:
            while True:
                connection.sendall(data)
        except ConnectionError:
            return


def echo(listener: socket.socket) -> None:
    """Accept a connection and echo it until it ends."""
    connection, _ = listener.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(1):
            connection.sendall(data)


def ping(address: str) -> float:
    """Return the median seconds of one byte to `address`: half of a round trip."""
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        times = []
        for _ in range(NUM_PINGS):
            began = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - began)
    return sorted(times)[NUM_PINGS // 2] / 2


def _rate(connection: socket.socket, seconds: float) -> float:
    buffer, num_bytes = bytearray(1 << 20), 0
    began = now = time.monotonic()
    while now < began + seconds:
        num_bytes += connection.recv_into(buffer)
        now = time.monotonic()
    return 8 * num_bytes / (now - began)


def serve() -> None:
    """Run the tasks on standard input."""
    with socket.create_server(("", PORT)) as listener:
        print("ready", flush=True)
        for line in sys.stdin:
            task, _, address = line.strip().partition(" ")
            if task == "receive":
                answer = receive(listener)
            elif task == "ping":
                answer = ping(address)
            else:
                answer = send(address) if task == "send" else echo(listener)
            print(answer, flush=True)


if __name__ == "__main__":
    serve()
