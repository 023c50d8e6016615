"""Connects to TCP, UDP, Unix and abstract Unix sockets, sends datagrams to those of the last two kinds, and asks for a name."""

import socket


def solve(x):
    done = []
    for family, kind, address in (
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", TCP_PORT)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", UDP_PORT)),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"{SECRET_FOLDER}/socket"),
        (socket.AF_UNIX, socket.SOCK_STREAM, f"\0hostile-{PARENT}"),
    ):
        try:
            with socket.socket(family, kind) as connection:
                connection.settimeout(1)
                connection.connect(address)
                connection.send(b"stolen")
            done.append(str(address))
        except OSError:
            pass
    for address in (f"{SECRET_FOLDER}/datagrams", f"\0hostile-datagrams-{PARENT}"):
        try:
            one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
            one.sendto(b"stolen", address)
            done.append(address)
        except OSError:
            pass
    try:
        socket.getaddrinfo("localhost", 80)
    except OSError:
        pass
    return done
