"""The helper that starts a real server: its port is nobody else's, and a server that ends early says why."""

import socket
import struct
import sys

import pytest

from tests.engines.vllm.serving import LAST_LINES, reserved_port, served, wait_for

IP_LOCAL_PORT_RANGE = 51
"""Linux 6.3 on: the ports from which a socket that asks for any is given one."""


def sharing(*options):
    """A socket with these options set."""
    opened = socket.socket()
    for option in options:
        opened.setsockopt(socket.SOL_SOCKET, option, 1)
    return opened


def only_from(opened, port):
    """The socket, which is given this port or none."""
    try:
        opened.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port | port << 16))
    except OSError:
        pytest.skip("this kernel does not let a socket choose the range of its ports")
    return opened


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR,), (socket.SO_REUSEPORT,)])
def test_nobody_who_asks_for_any_port_is_given_the_reserved_one(options):
    with (
        reserved_port() as port,
        only_from(sharing(*options), port) as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", 0))
    # the same socket is given it when it is free
    with only_from(sharing(*options), port) as other:
        other.bind(("127.0.0.1", 0))
        assert other.getsockname()[1] == port


def test_no_connection_begins_at_the_reserved_port():
    with (
        socket.create_server(("127.0.0.1", 0)) as peer,
        reserved_port() as port,
        only_from(sharing(), port) as other,
        pytest.raises(OSError, match=r"assign requested address|in use"),
    ):
        other.connect(peer.getsockname())


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEPORT,)])
def test_the_reserved_port_cannot_be_bound_by_its_number(options):
    with (
        reserved_port() as port,
        sharing(*options) as other,
        pytest.raises(OSError, match="in use"),
    ):
        other.bind(("127.0.0.1", port))


@pytest.mark.parametrize("options", [(socket.SO_REUSEADDR,), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)])
def test_a_server_as_vllm_binds_it_serves_at_the_reserved_port(options):
    with reserved_port() as port, sharing(*options) as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port), timeout=5), server.accept()[0]:
            pass
        # and from then on nobody else can take it
        with sharing(socket.SO_REUSEADDR) as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))


def test_a_server_that_ends_before_it_serves_shows_the_end_of_its_log(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "print(*range(99), sep=chr(10)); exit(3)"\n')
    python.chmod(0o755)
    with served(python, tmp_path, tmp_path) as (url, process), pytest.raises(RuntimeError) as caught:
        wait_for(url, process, tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert "ended with code 3 before it answered" in first
    assert lines == [str(n) for n in range(99 - LAST_LINES, 99)]
