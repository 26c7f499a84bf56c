"""Names of the tests' modules: every folder is a package, so that one name may stand in several rooms."""

from pathlib import Path

TESTS = Path(__file__).parent


def test_every_folder_with_modules_is_a_package():
    """A module of another folder would be imported under its bare name, where it may hide one or be hidden."""
    folders = {path.parent for path in TESTS.rglob("*.py") if "fake" not in path.relative_to(TESTS).parts}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
