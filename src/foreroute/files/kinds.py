"""Tells what kind of file some bytes begin, for whoever hands in another kind than the one that is read."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

HEAD_BYTES = 4096
"""Bytes at the beginning that tell the kind."""
WITH_TORCH = "torch.load(path, weights_only=True) opens it: hand in its arrays."
WITH_PICKLE = (
    "If torch.save wrote it, torch.load(path, weights_only=True) opens it; else write its arrays by numpy.save."
)
WITH_NUMPY = "numpy.load(path) opens it: hand in its arrays."
UNPACK = "Unpack it first."
TOML_LINE = re.compile(r"\[{1,2}[A-Za-z_][\w.-]*\]{1,2}\s*(#.*)?|[A-Za-z_][\w.-]*\s*=.*")


class FileKind(NamedTuple):
    """A kind of file: its name with an article, and what to do with it in a sentence, if anything."""

    name: str
    advice: str


TEXT = FileKind("text", "")
JSON = FileKind("JSON", "")
JSON_LINES = FileKind("JSON Lines (.jsonl), one value in each line", "Read it line by line, and hand in one value.")
TOML = FileKind("TOML", "")
MAGIC = {
    b"\x93NUMPY": FileKind("an array of numpy (.npy)", WITH_NUMPY),
    b"\x1f\x8b": FileKind("compressed by gzip (.gz)", UNPACK),
    b"\x28\xb5\x2f\xfd": FileKind("compressed by zstd (.zst)", UNPACK),
    b"BZh": FileKind("compressed by bzip2 (.bz2)", UNPACK),
    b"\xfd7zXZ\0": FileKind("compressed by xz (.xz)", UNPACK),
    b"PAR1": FileKind("a Parquet file", "Read it with pandas or pyarrow, and hand in its columns."),
    b"ARROW1": FileKind("an Arrow file", "Read it with pyarrow, and hand in its columns."),
    b"\x89HDF\r\n": FileKind("an HDF5 file", "Read it with h5py, and hand in its arrays."),
    b"version https://git-lfs": FileKind("a pointer of Git LFS, and not the file itself", "git lfs pull fetches it."),
    b"\xff\xfe": FileKind("text in UTF-16", "Save it as UTF-8."),
    b"\xfe\xff": FileKind("text in UTF-16", "Save it as UTF-8."),
}
PICKLE = FileKind("a pickle, as torch.save (.pt) and Python write them", WITH_PICKLE)
ZIPPED = {
    rb"/data\.pkl|/\.format_version|/byteorder|/version": FileKind("a file of torch.save (.pt), a zip", WITH_TORCH),
    rb"\.npy": FileKind("a zip of arrays of numpy (.npz)", WITH_NUMPY),
    rb"": FileKind("a zip archive", UNPACK),
}


def it_is(content: bytes | bytearray | memoryview, *, beside: tuple[FileKind, ...] = ()) -> str:
    """End a sentence with what the content is and what to do; empty where nothing tells, or for a kind of `beside`."""
    kind = kind_of(content)
    return "" if kind is None or kind in beside else f": it is {kind.name}. {kind.advice}".rstrip(". ")


def kind_of(content: bytes | bytearray | memoryview) -> FileKind | None:
    """Return the kind of file that begins so; None where nothing tells, and for a safetensors file."""
    head = bytes(content[:HEAD_BYTES])
    if not head:
        return FileKind("empty", "Was it written to the end? Make it again.")
    if head[4:9] == b"\0\0\0\0{":
        return None
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    if head.startswith(b"PK\x03\x04"):
        name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
        return next(kind for ending, kind in ZIPPED.items() if re.search(ending + rb"\Z", name))
    if re.match(rb"\x80[\x02-\x05]", head):
        return PICKLE
    if head[257:262] == b"ustar":
        return FileKind("a tar archive", UNPACK)
    return _kind_of_text(head)


def _kind_of_text(head: bytes) -> FileKind | None:
    """Return the kind of text that begins so; None where it is no text."""
    text = head.decode("utf-8", errors="ignore")
    # half a character may stand at the end of what was read; elsewhere none is left out
    if len(head) - len(text.encode()) > 3 or re.search(r"[\0-\x08\x0e-\x1f]", text):
        return None
    lines = [line for each in text.removeprefix("\ufeff").splitlines() if (line := each.strip())]
    first = next((line for line in lines if not line.startswith("#")), "")
    if TOML_LINE.fullmatch(first):
        return TOML
    if first.lower().startswith(("<!doctype", "<html")):
        return FileKind("a page in HTML", "It may tell what went wrong when it was fetched.")
    if not first.startswith(("{", "[")):
        return TEXT
    return JSON_LINES if len(lines) > 1 and lines[1][:1] in "{[" and _is_json(first) else JSON


def _is_json(line: str) -> bool:
    """Say whether a line is JSON."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
