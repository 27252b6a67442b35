"""Keeps a process of the test suite on this machine.

Every look-up or connection that would leave loopback is refused and noted in the file named by
``ORION_NETWORK_LOG``, so that a library which swallows the error still fails the test. Python imports a module of this
name at start-up when its folder is on ``PYTHONPATH``; ``tests/conftest.py`` puts it there for child processes and
imports it for its own.
"""

import ipaddress
import os
import socket

_connect, _connect_ex, _getaddrinfo = socket.socket.connect, socket.socket.connect_ex, socket.getaddrinfo


def _is_loopback(host) -> bool:
    if host in (None, "", b"", "localhost", b"localhost", socket.gethostname()):
        return True
    try:
        address = ipaddress.ip_address(host.decode() if isinstance(host, bytes) else host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _check(host) -> None:
    if _is_loopback(host):
        return
    log = os.environ.get("ORION_NETWORK_LOG")
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(f"{host}\n")
    raise socket.gaierror(socket.EAI_NONAME, f"the tests may not reach {host!r}: no network outside loopback")


def _guarded(call):
    def wrapper(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6):
            _check(address[0])
        return call(self, address)

    return wrapper


def _guarded_getaddrinfo(host, *args, **kwargs):
    _check(host)
    return _getaddrinfo(host, *args, **kwargs)


socket.socket.connect = _guarded(_connect)
socket.socket.connect_ex = _guarded(_connect_ex)
socket.getaddrinfo = _guarded_getaddrinfo
