"""Death at a chosen touch of the disk: whatever a process would write from there on is not written."""

import builtins
import os
from contextlib import contextmanager
from unittest import mock

from foreroute.train import folder as run_folder


class Killed(BaseException):
    """No `except Exception` sees it, and what cleans up after it fails too."""


class Disk:
    """Counts touches of a folder, and dies at one of them.

    Args:
        folder: other places are not on this disk.
        dies_at: the touch, from 0; None lives on.
    """

    def __init__(self, folder, dies_at=None):
        self.folder, self.touches, self.dies_at = str(folder), 0, dies_at

    def touch(self, path):
        if not str(path).startswith(self.folder):
            return
        if self.dies_at is not None and self.touches >= self.dies_at:
            raise Killed
        self.touches += 1

    def stopping(self, real):
        def call(path, *args, **options):
            self.touch(path)
            return real(path, *args, **options)

        return call

    def open(self, path, mode="r", **options):
        """Appending is two touches, with half of what is written between them."""
        file = builtins.open(path, mode, **options)  # noqa: SIM115  its user closes it
        if "a" in mode:
            real = file.write

            def write(text):
                self.touch(path)
                real(text[: len(text) // 2])
                file.flush()
                self.touch(path)
                real(text[len(text) // 2 :])

            file.write = write
        return file


@contextmanager
def on(disk):
    """Files are made, moved, removed and appended to on this disk."""
    with mock.patch.object(run_folder, "open", disk.open, create=True):
        names = ("replace", "unlink", "mkdir", "link")
        patches = [mock.patch.object(os, name, disk.stopping(getattr(os, name))) for name in names]
        real = os.open

        def opened(path, flags, *rest, **options):
            if flags & os.O_CREAT:
                disk.touch(path)
            return real(path, flags, *rest, **options)

        with mock.patch.object(os, "open", opened), patches[0], patches[1], patches[2], patches[3]:
            yield
