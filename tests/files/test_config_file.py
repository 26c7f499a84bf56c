"""Configurations as anyone may write them: one error that names the file, in a moment, and without a traceback."""

import time
from typing import Any

import pytest
from pydantic import Field

from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError
from foreroute.files.config_file import Count, Section, checked
from foreroute.files.toml import read_toml
from foreroute.simulate import load_config as load_simulation
from foreroute.train import load_config as load_training

DOORS = [read_toml, load_cluster, load_simulation, load_training]


@pytest.mark.parametrize("read", DOORS, ids=["any", "topology", "simulation", "training"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 5000, "nested too deep"),
        (b"a = " + b"[" * 60 + b"]" * 60, "nested more than 32 deep"),
        (b"a = " + b"9" * 5000, "not a readable TOML file"),
        (b"a = 9223372036854775808", "integer of more than 64 bits"),
        (b'name = "a\\u0000b"', "NUL character"),
        (b'a = "\xff"', "not text in UTF-8"),
        (b"#" * 70_000, "70000 bytes; expected 65536 at most"),
        (b".".join([b"a"] * 30_000) + b" = 1", "line 1 has 29999 dots"),
    ],
)
def test_text_that_is_no_configuration_is_one_error(tmp_path, read, content, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    before = time.monotonic()
    with pytest.raises(ConfigError, match=rf"bad\.toml.*{message}"):
        read(path)
    assert time.monotonic() - before < 5


class Inner(Section):
    count: Count = 1
    more: dict[str, Any] = Field(default_factory=dict)


class Outer(Section):
    inner: Inner = Inner()
    counts: tuple[Count, ...] = ()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"inner": {"count": 2**31}}, r"inner\.count: .*less than or equal to 999999 \(got 2147483648\)"),
        ({"inner": {"more": {"a": -(2**63) - 1}}}, r"inner\.more\.a: an integer of more than 64 bits"),
        ({"counts": ("x" * 10_000,)}, r"counts\.0: .*x{20}"),
        ({"counts": (0,) * 1000}, "and 980 more"),
        ({"k" * 100_000: 1}, "unknown key"),
    ],
)
def test_values_from_anywhere_are_refused_in_few_words(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        checked(Outer, values, source="here")
    assert len(str(caught.value)) < 5000
