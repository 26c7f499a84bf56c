"""Releases of other projects: one table, looked at when an adapter is imported or an engine starts, and said alike."""

import re
import tomllib
import types
import warnings
from pathlib import Path

import pytest

from foreroute.adapters import versions
from foreroute.adapters.versions import PEERS, require_engine, require_peers
from foreroute.errors import AttachError, EngineError

ROOT = Path(__file__).parents[2]
ENGINES = {name: peer for name, peer in PEERS.items() if peer.module is None}


@pytest.fixture
def require(monkeypatch):
    """Looks at a release that is said to be installed, or that an engine says of itself; nothing of it has to be."""

    def look(name, version):
        if name in ENGINES:
            return require_engine(name, version)
        stand_in = types.ModuleType(name)
        if version is not None:
            stand_in.__version__ = version
        versions._require_installed.cache_clear()
        monkeypatch.setattr(versions, "import_module", {PEERS[name].module: stand_in}.__getitem__)
        return require_peers(name)

    yield look
    versions._require_installed.cache_clear()


NEWER = "99.1.0rc2+local"
RELEASES = {
    "torch": (["2.9.1+cu128", "1.13"], ["2.13", "2.13.0+cpu", "2.10.0a0+git1", "2.12.1"], [NEWER], []),
    "transformers": (["4.57.0", "5.2.9"], ["5.14.0.dev0"], [NEWER], []),
    "megatron-core": (["0.16.0", "0.15.3"], ["0.17.0+abcdef"], [NEWER], []),
    "trl": (["1.5.1"], ["1.16"], [NEWER], [None, "unknown", "1", "dev"]),
    "verl": (["0.9.0", "0.8"], [], [NEWER], []),
    "mbridge": (["0.15.0"], [], [NEWER], []),
    "vLLM": (["0.27.9", "v0.27.1"], ["0.28.0", "v0.29.4+cu130", "0.31.0", "0.32.0rc2"], ["0.33.0+cpu"], [""]),
    "SGLang": (["0.5.9", "0.5.9.post1", "0.4.10", "0.0.0"], ["0.5.10.post1"], ["0.5.24", "1.0"], ["main"]),
}
"""Those that are too old, those that are taken beside the lowest and the newest, newer ones, and what has no number."""


@pytest.mark.parametrize("name", PEERS)
def test_old_releases_are_refused_by_name_and_untried_ones_warned_of(require, name):
    peer, (old, taken, newer, unread) = PEERS[name], RELEASES[name]
    for version in old:
        said = rf"^{name} {re.escape(version)} .*not work.* needs {peer.lowest} .*install {peer.newest}"
        with pytest.raises(EngineError if name in ENGINES else AttachError, match=said):
            require(name, version)
    for version in (peer.lowest, peer.newest, *taken):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            require(name, version)
    for versions_warned, said in (
        (newer, rf"{name} {{}} .*newer.*{peer.newest}"),
        (unread, rf"{name} .*'{{}}'.*no number.*{peer.lowest}"),
    ):
        for version in versions_warned:
            with pytest.warns(UserWarning, match=said.format(re.escape(str(version)))):
                require(name, version)


def test_the_page_and_what_pip_asks_for_and_make_installs_have_the_table_that_the_code_has():
    """The newest releases are those that make and CI install, and the lowest are those of the other environments."""
    text = (ROOT / "docs/where.md").read_text().partition("\n### Frameworks and engines\n")[2].partition("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split("\n") if line[:3] == "| `"]
    assert {row[0].strip("`"): tuple(row[1:3]) for row in rows} == {
        name: (peer.lowest, peer.newest) for name, peer in PEERS.items()
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    asked = {name: least for line in lines for name, least in re.findall(r"^([\w-]+)>=([\d.]+)$", line)}
    assert all(asked[name] == PEERS[name].lowest for name in ("torch", "transformers", "megatron-core"))
    assert PEERS["trl"].lowest.startswith(asked["trl"] + ".")
    pinned = re.findall(r"^([\w-]+)==([\w.]+)$", (ROOT / "constraints.txt").read_text(), re.M)
    pins = {name.lower().replace("_", "-"): version for name, version in pinned}
    assert all(pins[name] == PEERS[name].newest for name in ("torch", "transformers", "trl", "mbridge"))
    assert pins["megatron-core"] == PEERS["megatron-core"].lowest
    for file, line in (
        ("megatron", f"MEGATRON_VERSION ?= {PEERS['megatron-core'].newest}\n"),
        ("verl", f"VERL_VERSION ?= {PEERS['verl'].newest}\n"),
        ("vllm", f" .venv-vllm-{PEERS['vLLM'].newest}\n"),
    ):
        assert line in (ROOT / f"make/{file}.mk").read_text()
