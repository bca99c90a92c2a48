"""``network.py ADDRESSES FOLDER COMMAND...``: runs a command where no packet to the addresses is ever answered, beside
httpbin from ``FOLDER`` on port 80.

In a sandbox without a network such addresses are refused at once, which is another error than the one tests wait for.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys

CAP_NET_ADMIN = 12
_DROP_BOUND, _AMBIENT, _AMBIENT_LOWER = 24, 47, 3
_NEW_ROUTE, _ERROR = 24, 2
_REQUEST, _ACK, _CREATE = 0x1, 0x4, 0x400
_TO, _INTERFACE = 1, 4
_MAIN, _BOOT, _LINK, _UNICAST = 254, 3, 253, 1


def main(words: list[str]) -> int:
    """Execute the command, without the capability that this needed."""
    addresses, folder, *command = words
    for address in filter(None, addresses.split(",")):
        lose_packets_to(address)
    drop(CAP_NET_ADMIN)
    if folder:
        serve_httpbin(folder)
    os.execvp(command[0], command)


def lose_packets_to(address: str) -> None:
    """Route an IPv4 address to the loopback interface, which drops what is not its own (``ip route add A dev lo``)."""
    values = {_TO: socket.inet_aton(address), _INTERFACE: struct.pack("=I", socket.if_nametoindex("lo"))}
    attributes = b"".join(struct.pack("=HH", 4 + len(value), kind) + value for kind, value in values.items())
    route = struct.pack("=8BI", socket.AF_INET, 32, 0, 0, _MAIN, _BOOT, _LINK, _UNICAST, 0)
    head = struct.pack("=IHHII", 16 + len(route + attributes), _NEW_ROUTE, _REQUEST | _ACK | _CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.send(head + route + attributes)
        answer = kernel.recv(4096)
    (code,) = struct.unpack_from("=i", answer, 16)
    if struct.unpack_from("=IH", answer)[1] == _ERROR and code:
        raise OSError(-code, os.strerror(-code))


def drop(capability: int) -> None:
    """Take a capability from this process and from all that it executes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    kept = ~(1 << capability) & 0xFFFFFFFF
    done = [libc.prctl(_DROP_BOUND, capability, 0, 0, 0), libc.prctl(_AMBIENT, _AMBIENT_LOWER, capability, 0, 0)]
    done.append(libc.capget(header, sets))
    # Effective, permitted and inheritable; the first three words hold the capabilities below 32.
    sets[:3] = [each & kept for each in sets[:3]]
    done.append(libc.capset(header, sets))
    if any(done):
        raise OSError(ctypes.get_errno(), f"capability {capability} cannot be dropped")


def serve_httpbin(folder: str) -> None:
    """Answer on port 80 from another process. Who connects before that has loaded waits."""
    listening = socket.create_server(("127.0.0.1", 80), backlog=128)
    if os.fork():
        listening.close()
        return
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nowhere, number)
    sys.path.insert(0, folder)
    from httpbin import app  # pyright: ignore[reportMissingImports]
    from werkzeug.serving import make_server  # pyright: ignore[reportMissingImports]

    make_server("127.0.0.1", 80, app, threaded=True, fd=listening.fileno()).serve_forever()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
