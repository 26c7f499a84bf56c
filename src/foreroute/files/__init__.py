"""How bytes get in and out: only files are opened, none is mapped, and each is written whole or not at all.

No format lives here: what the bytes mean is the business of the room that reads them. TOML configurations, which
several rooms have, are read and checked by `config_file`.
"""

from foreroute.files.reading import RegularFile, parse_json, read_file, read_text
from foreroute.files.tensor_file import TensorFile
from foreroute.files.writing import check_writable, write_atomically, writing_named

__all__ = [
    "RegularFile",
    "TensorFile",
    "check_writable",
    "parse_json",
    "read_file",
    "read_text",
    "write_atomically",
    "writing_named",
]
