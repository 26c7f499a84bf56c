"""The helper that starts a real server: its port is nobody else's, and a server that ends early says why."""

import socket
import sys

import pytest

from tests.engines.vllm.serving import LAST_LINES, reserved_port, served, wait_for


def sharing(*options):
    """A socket with these options set."""
    opened = socket.socket()
    for option in options:
        opened.setsockopt(socket.SOL_SOCKET, option, 1)
    return opened


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
