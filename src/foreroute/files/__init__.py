"""How bytes get in and out, at paths and URLs: only files are opened, none is mapped, each is written whole or not.

No format lives here: what the bytes mean is the business of the room that reads them. TOML configurations, which
several rooms have, are read and checked by `config_file`.
"""

from foreroute.files.container import (
    FileFormat,
    StoredTensor,
    TensorFile,
    TensorSchema,
    as_place,
    blake2b_hex,
    blake2b_int64,
    checksum,
    objection,
    tensors_to_bytes,
)
from foreroute.files.places import names_in, within
from foreroute.files.regular import open_regular, parse_json, read_file, read_text
from foreroute.files.writing import check_writable, write_atomically, writing_named

__all__ = [
    "FileFormat",
    "StoredTensor",
    "TensorFile",
    "TensorSchema",
    "as_place",
    "blake2b_hex",
    "blake2b_int64",
    "check_writable",
    "checksum",
    "names_in",
    "objection",
    "open_regular",
    "parse_json",
    "read_file",
    "read_text",
    "tensors_to_bytes",
    "within",
    "write_atomically",
    "writing_named",
]
