"""Readers with one defect each, which the fuzzer must see."""

import ctypes
import json
import time

import numpy as np

from benchmarks.fuzzing.target import Target
from foreroute.errors import InputError


def readers(folder):
    def make(rng):
        return json.dumps({"values": list(range(40))}).encode()

    def sound(raw):
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise InputError("no JSON") from error

    def crashes(raw):
        if b"7" not in raw:
            ctypes.string_at(0)
        return sound(raw)

    def hangs(raw):
        if b"7" not in raw:
            time.sleep(60)
        return sound(raw)

    def takes_memory(raw):
        np.ones((200 if b"7" not in raw else 1) << 17)
        return sound(raw)

    def takes_address_space(raw):
        np.empty((1 << 30) if b"7" not in raw else 1)
        return sound(raw)

    def check(raw, value):
        assert max(value["values"]) < 40

    def target(name, read, **others):
        return Target(name, make, read, lambda a, b: a == b, **others)

    return [
        target("sound", sound, check=lambda raw, value: None),
        target("accepts damage", sound, has_checksum=True),
        target("breaks a rule", sound, check=check),
        target("traceback", lambda raw: json.loads(raw), check=lambda raw, value: None),
        target("crashes", crashes, check=lambda raw, value: None),
        target("hangs", hangs, check=lambda raw, value: None),
        target("takes memory", takes_memory, check=lambda raw, value: None),
        target("takes address space", takes_address_space, check=lambda raw, value: None),
    ]
