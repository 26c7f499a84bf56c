"""Words that the house no longer uses stay away from pages, docstrings and messages, and prose from tests of errors."""

import ast
import re
from pathlib import Path

import pytest

from tests.source_nodes import source_nodes

ROOT = Path(__file__).parents[1]
INSTEAD = {
    r"\bseals?\b": "checksum",
    r"\bin vain\b": "what did not come",
    r"\bastray\b": "sent to the wrong ranks",
    r"\bheed(s|ed)?\b": "the verb of what is done",
    r"\bleads nowhere\b": "does not exist",
    r"\blikewise\b": "say it again",
    r"\bfor want of\b": "is missing",
    r"\btruth value\b": "bool",
    r"\bso many\b(?! words)": "this many",
    r"\bmisfits?\b": "what does not fit",
    r"\brivals?\b": "baseline",
    r"(?:^|[.!?]\s+|\n\s*- )Of [A-Za-z`\d]": "a sentence begins with its subject",
}


def fences_away(page):
    return re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)


def texts():
    """Place -> text, of every page, and of every string of the sources."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        yield page.relative_to(ROOT), fences_away(page.read_text(encoding="utf-8"))
    for path, nodes in source_nodes():
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{path}:{node.lineno}", node.value


@pytest.fixture(scope="module")
def all_texts():
    return list(texts())


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_is_gone(all_texts, word):
    assert not [place for place, text in all_texts if re.search(word, text, re.IGNORECASE if word[0] == "\\" else 0)]


def test_words_are_seen_where_they_stand():
    planted = ["a Seal on it", "rows. Of which"]
    seen = [re.search("|".join(INSTEAD), text, re.IGNORECASE) for text in planted]
    assert all(seen)
    assert fences_away("a\n```python\n# Of such\n```\nb").split() == ["a", "b"]


def test_nobody_is_told_to_install_a_name_that_is_not_ours():
    """foreroute is in no package index; whoever registers the name would own every reader's machine."""
    told = re.compile(r"foreroute\[[a-z,]+\]|(install|add|download)[^\S\n]+(-\S+\s+)*['\"]?foreroute\b(?! @)")
    places = ("src", "docs", "examples", "make", "benchmarks", "experiments")
    read = [ROOT / "README.md", ROOT / "Makefile", *(path for place in places for path in (ROOT / place).rglob("*"))]
    kinds = {".py", ".md", ".j2", ".toml", ".mk", ".sh", ""}
    texts = {path: path.read_text(errors="replace") for path in read if path.is_file() and path.suffix in kinds}
    assert len(texts) > 300
    assert not [path for path, text in texts.items() if told.search(text)]
    planted = (
        "pip install 'foreroute[report]'",
        "    pip install -U foreroute  # on every node",
        "pip install '.[hf]'",
    )
    assert [bool(told.search(text)) for text in planted] == [True, True, False]


def prose_in_matches(tree):
    """The patterns of `pytest.raises` and `pytest.warns` with three plain words in a row, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("raises", "warns"):
            for keyword in node.keywords:
                text = getattr(keyword.value, "value", "") if keyword.arg == "match" else ""
                if not isinstance(text, str):
                    continue
                plain = re.sub(r"\\.|\[[^\]]*\]|[.*+?(){}|^$]", " # ", text)
                if re.search(r"(?:^|[^\w])[A-Za-z']{2,}[,;:]? [A-Za-z']{2,}[,;:]? [A-Za-z']{2,}", plain):
                    yield node.lineno, text


@pytest.mark.slow
def test_errors_are_matched_by_their_class_and_key_words():
    """So that a message can be said better; what it must hold are names, numbers and two words."""
    found = [
        (str(test.relative_to(ROOT)), *place)
        for test in sorted((ROOT / "tests").rglob("*.py"))
        for place in prose_in_matches(ast.parse(test.read_text(encoding="utf-8")))
    ]
    assert not found
    planted = (
        'pytest.raises(E, match="the trace has 3 rows, and not so many")\npytest.raises(E, match=r"trace.*3 rows")'
    )
    assert [line for line, _ in prose_in_matches(ast.parse(planted))] == [1]
