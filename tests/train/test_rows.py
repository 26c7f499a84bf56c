"""Data sets: what a line may be, and the words for what it may not."""

import pytest

from foreroute.errors import DatasetError
from foreroute.train.tasks.rows import read_rows


def written(tmp_path, *lines, end="\n"):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end.encode())
    return path


def test_rows_keep_what_they_have(tmp_path):
    lines = [
        '{"prompt": "3*4?", "answer": 12, "level": {"hard": true}}',
        '{"messages": [{"role": "user", "content": "größer?"}], "answer": "ja"}',
    ]
    one, two = read_rows(written(tmp_path, *lines, end=""))
    assert one.values == {"prompt": "3*4?", "answer": "12", "level": {"hard": True}}
    assert two.values == {"messages": [{"role": "user", "content": "größer?"}], "answer": "ja"}
    assert two.where.endswith("data.jsonl, line 2")


GOOD = '{"prompt": "3*4?"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", r"'' is not JSON"),
        ("{", r"'\{' is not JSON"),
        ("[1]", r'a list; expected an object such as \{"prompt"'),
        ("3", "a number; expected an object"),
        ("{}", r"neither of \"prompt\" and \"messages\" \(keys: none\); expected one of the two"),
        ('{"prompt": "a", "messages": []}', r"both of"),
        ('{"promt": "a"}', r"keys: promt"),
        ('{"prompt": ""}', "\"prompt\" is ''; expected text"),
        ('{"prompt": 3}', "\"prompt\" is '3'; expected text"),
        ('{"messages": []}', "expected a list of messages"),
        ('{"messages": ["hi"]}', r"message 1 is 'hi'; expected \{\"role\""),
        ('{"messages": [{"role": "user", "content": ["hi"]}]}', "both text"),
        ('{"messages": [{"role": "user", "content": "hi", "name": "x"}]}', "message 1 is"),
        ('{"prompt": "a", "answer": null}', "\"answer\" is 'null'; expected text or a number"),
        ('{"prompt": "a", "answer": true}', "expected text or a number"),
        ('{"prompt": "a", "prompt": "b"}', 'key "prompt" is there twice'),
        ('{"prompt": "a", "x": NaN}', "NaN is no JSON number"),
        (b'{"prompt": "\xff"}', "is not JSON .*utf-8"),
        ("[" * 100000, "is not JSON"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, line, message):
    with pytest.raises(DatasetError, match=rf"data\.jsonl, line 2: .*{message}"):
        read_rows(written(tmp_path, GOOD, line, GOOD))


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(DatasetError, match=r"none\.jsonl cannot be read \(No such file"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(DatasetError, match="is empty"):
        read_rows(written(tmp_path, end=""))
