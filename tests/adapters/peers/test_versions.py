"""Releases of other projects: one table, looked at when an adapter is imported, and said alike everywhere."""

import re
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest

from foreroute.adapters import versions
from foreroute.adapters.versions import PEERS, require_peers
from foreroute.errors import AttachError

ROOT = Path(__file__).parents[3]
VERSION = r"(\d+\.\d+(?:\.\d+)?)"


@pytest.fixture
def installed(monkeypatch):
    """Says what is installed; nothing of it has to be."""

    def install(package, version):
        stand_in = types.ModuleType(package)
        if version is not None:
            stand_in.__version__ = version
        monkeypatch.setattr(versions, "import_module", {PEERS[package].module: stand_in}.__getitem__)

    versions._require_peer.cache_clear()
    yield install
    versions._require_peer.cache_clear()


@pytest.mark.parametrize(
    ("package", "version"),
    [("torch", "2.9.1+cu128"), ("torch", "1.13"), ("transformers", "4.57.0"), ("transformers", "5.10.3"),
     ("megatron-core", "0.16.0"), ("megatron-core", "0.15.3"), ("trl", "1.15.9"), ("verl", "0.9.0"), ("verl", "0.8")],
)  # fmt: skip
def test_a_release_that_is_too_old_is_refused_by_name(installed, package, version):
    installed(package, version)
    with pytest.raises(AttachError) as refused:
        require_peers(package)
    assert f"{package} {version} is installed; foreroute works with {PEERS[package].lowest} or newer" in str(
        refused.value
    )


@pytest.mark.parametrize("package", sorted(PEERS))
def test_a_release_that_is_too_new_gives_one_warning_by_name(installed, package):
    installed(package, "99.1.0rc2+local")
    with pytest.warns(UserWarning, match=rf"{package} 99\.1\.0rc2\+local is newer than {PEERS[package].newest}"):
        require_peers(package)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_peers(package)


@pytest.mark.parametrize(
    ("package", "version"),
    [*[(p, peer.lowest) for p, peer in PEERS.items()], *[(p, peer.newest) for p, peer in PEERS.items()],
     ("torch", "2.13"), ("torch", "2.13.0+cpu"), ("torch", "2.10.0a0+git1"), ("torch", "2.12.1"),
     ("transformers", "5.14.0.dev0"), ("megatron-core", "0.17.0+abcdef"), ("trl", None), ("trl", "unknown")],
)  # fmt: skip
def test_releases_in_between_and_builds_that_state_none_are_taken(installed, package, version):
    installed(package, version)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        require_peers(package)


@pytest.mark.parametrize(
    ("adapter", "package"),
    [("hf", "torch"), ("hf", "transformers"), ("megatron", "megatron-core"), ("trl", "trl"), ("verl.fsdp", "verl")],
)
def test_an_adapter_looks_before_it_imports_anything_else_of_its_peer(adapter, package):
    """The peer at hand has nothing but a name and an old version."""
    module = PEERS[package].module
    script = (
        "import sys, types\n"
        f"for name in {[module.split('.')[0], module]!r}:\n"
        "    sys.modules[name] = types.ModuleType(name); sys.modules[name].__version__ = '0.1'\n"
        "from foreroute.errors import AttachError\n"
        f"try: import foreroute.adapters.{adapter}\n"
        "except AttachError as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert run.stdout.startswith(f"{package} 0.1 is installed"), run.stderr


def test_the_documentation_has_the_same_table():
    text = (ROOT / "docs/adapters.md").read_text()
    rows = re.findall(rf"^\| `([a-z-]+)` \| {VERSION} \| {VERSION} \|", text, re.M)
    assert {name: (lowest, newest) for name, lowest, newest in rows} == {
        name: (peer.lowest, peer.newest) for name, peer in PEERS.items()
    }


def test_no_page_names_another_release():
    """Releases that a page is about, its table and the examples of methods aside."""
    named = {
        "torch": "torch",
        "transformers": "transformers",
        "megatron-core": "megatron-core",
        "TRL": "trl",
        "verl": "verl",
    }
    allowed = {name: {peer.lowest, peer.newest} for name, peer in PEERS.items()}
    allowed["transformers"] |= {"5.14"}  # all families
    allowed["trl"] |= {"1.16"}
    seen = []
    for page in ("adapters", "megatron", "trl", "verl", "replay", "engines"):
        text = (ROOT / f"docs/{page}.md").read_text()
        for name, package in named.items():
            for version in re.findall(rf"\b{name}\s+(?:from\s+)?{VERSION}\b", text):
                assert version in allowed[package], f"docs/{page}.md names {name} {version}"
                seen.append((page, package))
    assert {("trl", "trl"), ("verl", "verl"), ("megatron", "megatron-core"), ("adapters", "transformers")} <= set(seen)


def test_what_is_tested_is_what_the_table_says():
    """The newest releases are those that make and CI install, and the lowest are those of the other environments."""
    pins = dict(re.findall(rf"^([\w-]+)=={VERSION}$", (ROOT / "constraints.txt").read_text(), re.M))
    verl, newest = (ROOT / "make/verl.mk").read_text(), (ROOT / "make/megatron.mk").read_text()
    assert {name: pins[name] for name in ("torch", "transformers", "trl")} == {
        name: PEERS[name].newest for name in ("torch", "transformers", "trl")
    }
    assert pins["megatron-core"] == PEERS["megatron-core"].lowest
    assert f"MEGATRON_VERSION ?= {PEERS['megatron-core'].newest}\n" in newest
    assert f"VERL_VERSION ?= {PEERS['verl'].newest}\n" in verl
    assert f"transformers=={PEERS['transformers'].lowest} " in verl
