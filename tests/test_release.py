"""What `make release` says of Pythons that are not here."""

import importlib.util
import sys
from pathlib import Path

import pytest

FOUND = importlib.util.spec_from_file_location("release", Path(__file__).parents[1] / "make" / "release.py")


@pytest.mark.parametrize("pythons", [[], ["python0.1"], ["python0.1", "python0.2"]])
def test_a_release_that_no_python_tried_is_not_to_be_published(tmp_path, monkeypatch, capsys, pythons):
    release = importlib.util.module_from_spec(FOUND)
    FOUND.loader.exec_module(release)
    for name in ("check_sdist", "check_wheel"):
        monkeypatch.setattr(release, name, lambda path: None)
    version = release.project()["version"]
    for name in ("foreroute", "foreroute_core"):
        for end in (".tar.gz", "-py3-none-any.whl"):
            (tmp_path / f"{name}-{version}{end}").touch()
    monkeypatch.setattr(sys, "argv", ["release.py", "try", str(tmp_path), *pythons])
    with pytest.raises(SystemExit, match="was tried"):
        release.main()
    assert "To publish" not in capsys.readouterr().out
