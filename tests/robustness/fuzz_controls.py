"""Readers with one defect each, which the fuzzer must see."""

import ctypes
import json
import signal

import numpy as np

from foreroute.errors import InputError
from tests.robustness.target import Target


def readers(folder):
    def make(rng):
        return json.dumps({"values": list(range(40))}).encode()

    def sound(raw):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InputError("no JSON") from error

    def names_no_file(path):
        if path.read_bytes() != make(None):
            raise InputError("the file holds something else")

    def harmed(harm):
        def read(raw):
            if b"7" not in raw:
                harm()
            return sound(raw)

        return read

    def check(raw, value):
        assert max(value["values"]) < 40

    def target(name, read, check=lambda raw, value: None, **others):
        return Target(name, make, read, check=check, **others)

    return [
        target("sound", sound),
        target("accepts damage", sound, has_checksum=True),
        target("breaks a rule", sound, check=check),
        target("traceback", json.loads),
        target("names no file", names_no_file, file=folder / "given", has_checksum=True),
        target("crash", harmed(lambda: ctypes.string_at(0))),
        target("hang", harmed(lambda: signal.sigwait([signal.SIGUSR1]))),
        target("takes memory", harmed(lambda: np.ones(100 << 17))),
        target("takes address space", harmed(lambda: np.empty(1 << 30))),
    ]
