"""Files of another kind, what is no path, and configurations as anyone may write them: named, with what to do."""

import bz2
import gzip
import io
import lzma
import pickle
import tarfile
import time
import zipfile
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import Field

import foreroute as fr
from foreroute.adapters.checkpoint import ServedModel
from foreroute.capture import load_generation
from foreroute.costs.cluster_file import load_cluster
from foreroute.errors import ConfigError, ForerouteError, InputError
from foreroute.files.config_file import Count, Section, checked
from foreroute.files.regular import parse_json
from foreroute.files.toml import read_toml
from foreroute.plan import load_counts, load_plan
from foreroute.records import read_runs
from foreroute.simulate import load_config as load_simulation
from foreroute.train import RunFolder
from foreroute.train import load_config as load_training
from tests.tiers import grid


def in_memory(write):
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def zipped(file):
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("readme.txt", "hello")


def tarred(file):
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty"))


ARRAYS = {"routed_experts": torch.zeros(2, 3, 1, 2, dtype=torch.int64)}
OF_KIND = {
    "torch, zipped": (in_memory(lambda file: torch.save(ARRAYS, file)), "torch.save (.pt)"),
    "pickle": (pickle.dumps(ARRAYS["routed_experts"].numpy()), "a pickle"),
    "npy": (in_memory(lambda file: np.save(file, np.zeros((2, 3)))), "foreroute.plan.save_counts"),
    "gzip": (gzip.compress(b"{}" * 9, mtime=0), "gzip"),
    "bzip2": (bz2.compress(b"{}"), "bzip2 (.bz2). Unpack"),
    "xz": (lzma.compress(b"{}"), "xz (.xz). Unpack"),
    "tar": (in_memory(tarred), "a tar archive. Unpack"),
    "zip": (in_memory(zipped), "a zip archive"),
    "npz": (in_memory(lambda file: np.savez(file, a=np.zeros(2))), "(.npz)"),
    "Arrow": (b"ARROW1" + bytes(40), "Arrow file"),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + bytes(40), "an HDF5 file"),
    "HTML": (b"<!DOCTYPE html>\n<title>Sign in</title>", "in HTML"),
    "parquet": (b"PAR1" + bytes(40), "Parquet"),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n", "Git LFS"),
    "JSON": (b' {"model_type": "qwen3_moe", "num_experts": 8}', "is JSON"),
    "JSON Lines": (b'{"input": "a"}\n{"input": "b"}\n', "JSON Lines (.jsonl). Hand in"),
    "TOML": (b"# a cluster\n[topology]\nnum_ranks = 8\n", "is TOML"),
    "text": ("Zuerst, später".encode(), "is text"),
    "nothing": (b"", "empty"),
}
BINARY_DOORS = {"trace": fr.load, "generation": load_generation, "counts": load_counts, "plan": load_plan}
TOML_DOORS = {"topology": load_cluster, "simulation": load_simulation, "training": load_training}


@grid("name", OF_KIND, quick=9)
def test_binary_doors_name_the_kind_and_what_writes_theirs(name, tmp_path):
    content, words = OF_KIND[name]
    path = tmp_path / "handed in"
    path.write_bytes(content)
    for door, read in BINARY_DOORS.items():
        with pytest.raises(InputError) as told:
            read(path)
        message = str(told.value)
        assert words in message, (door, message)
        assert "is not a safetensors file" in message
        assert "copy it again" not in message
        assert "foreroute" in message, "what writes such files"
        assert ("foreroute convert" in message) == (door in ("trace", "generation")), "of an engine's answer"
    with pytest.raises(InputError, match=r"opened.*safetensors") as told:
        fr.load(io.BytesIO(content))
    assert words in str(told.value)
    others = {**TOML_DOORS, "JSON": lambda path: parse_json(path.read_bytes(), InputError, name="it")}
    own = {"JSON": ("JSON",), **dict.fromkeys(TOML_DOORS, ("TOML", "LFS", "nothing"))}
    for door, read in others.items():
        if name != "text" and name not in own[door]:
            with pytest.raises(InputError) as told:
                read(path)
            assert words in str(told.value), door


@pytest.mark.parametrize("path", [None, b"name", 3, ["a"]], ids=lambda path: type(path).__name__)
def test_what_is_no_path_is_refused_in_words(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trace = fr.RoutingTrace.unrouted(fr.RoutingSpec(8, 2, (fr.RoutedLayer(0),)), [[1, 2, 3]])
    doors = [fr.load, lambda at: fr.save(trace, at), fr.trace.load_parts, lambda at: read_runs([at]), RunFolder]
    for door in [*doors, *BINARY_DOORS.values(), *TOML_DOORS.values(), ServedModel.at]:
        with pytest.raises(ForerouteError, match=r"^a path is .*pathlib"):
            door(path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("read", [read_toml, *TOML_DOORS.values()], ids=["any", *TOML_DOORS])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a = " + b"[" * 5000, r"nested too.*deep"),
        (b"a = " + b"[" * 60 + b"]" * 60, r"nested.*32 deep"),
        (b"a = " + b"9" * 5000, r"readable.*TOML"),
        (b"a = 9223372036854775808", r"integer.*64 bits"),
        (b'name = "a\\u0000b"', "NUL character"),
        (b'a = "\xff"', r"not text.*UTF-8"),
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
        ({"inner": {"count": 2**31}}, r"inner\.count: .*999999 \(got 2147483648\)"),
        ({"inner": {"more": {"a": -(2**63) - 1}}}, r"inner\.more\.a: .*64 bits"),
        ({"counts": ("x" * 10_000,)}, r"counts\.0: .*x{20}"),
        ({"counts": (0,) * 1000}, "and 980 more"),
        ({"k" * 100_000: 1}, "unknown key"),
    ],
)
def test_values_from_anywhere_are_refused_in_few_words(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        checked(Outer, values, source="here")
    assert len(str(caught.value)) < 5000
