"""Words that the house no longer uses stay away from pages, docstrings and messages."""

import ast
import re
from pathlib import Path

import pytest

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
    for page in sorted((ROOT / "docs").rglob("*.md")):
        yield page.relative_to(ROOT), fences_away(page.read_text(encoding="utf-8"))
    for source in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{source.relative_to(ROOT)}:{node.lineno}", node.value


TEXTS = list(texts())


@pytest.mark.parametrize("word", INSTEAD)
def test_a_word_is_gone(word):
    assert not [place for place, text in TEXTS if re.search(word, text, re.IGNORECASE if word[0] == "\\" else 0)]


def test_words_are_seen_where_they_stand():
    planted = ["a Seal on it", "waits in vain", "rows. Of which", "padding: likewise.", "sent astray"]
    seen = [re.search("|".join(INSTEAD), text, re.IGNORECASE) for text in planted]
    assert all(seen)
    assert fences_away("a\n```python\n# Of such\n```\nb").split() == ["a", "b"]
