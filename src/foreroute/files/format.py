"""File formats by declaration: what a file must hold, from which reading, refusing and writing follow."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from foreroute.errors import InputError, few
from foreroute.files.container import DTYPES, StoredTensor, TensorFile, checksum, tensors_to_bytes, write_tensors
from foreroute.files.regular import ByteSource
from foreroute.files.writing import write_atomically, writing_named

KEY = "foreroute."
"""Metadata whose key begins so are a format's own: none may be missing, and none may be there that it does not name.
Others are anybody's, and no part of the checksum."""


@dataclass(frozen=True)
class TensorSchema:
    """What one tensor must be.

    Attributes:
        dtypes: the types it may have, by their names in a header: "I16", or "U8 U16".
        axes: a letter for each of its axes. Axes with one letter have one length in all tensors of a file.
    """

    dtypes: str
    axes: str


@dataclass(frozen=True)
class FileFormat:
    """A kind of file in the shared container.

    Its metadata are `foreroute.<name>`, which holds the version, those of `metadata`, and `foreroute.checksum`.

    Attributes:
        name: what it is, in keys and messages.
        version: the only one that is read.
        kind: the error to raise.
        metadata: keys, without `foreroute.`.
        tensors: what they must be by name; None for any.
        made_by: what writes such files, in words, for whoever hands in another file.
        apart: tensors that a reader reads in part. They have checksums of their own, and no place in that of the file.
        most_header_bytes: a longer safetensors header is refused before it is parsed.
    """

    name: str
    version: int
    kind: type[InputError]
    metadata: tuple[str, ...]
    tensors: Mapping[str, TensorSchema] | None
    made_by: str
    apart: tuple[str, ...] = ()
    most_header_bytes: int = 1 << 20

    def read(self, source: str | os.PathLike[str] | ByteSource) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
        """Metadata by their keys in `metadata`, and tensors, once they are known to be what was written.

        Raises:
            kind: when it cannot be read, is of another format or version, lacks something, holds something else or
                something of another type or shape, or does not have the checksum that it states.
        """
        with TensorFile(source, self.kind, most_header_bytes=self.most_header_bytes) as file:
            return self.read_opened(file)

    def read_opened(self, file: TensorFile) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
        """As `read`, of an opened file, without the tensors that stand apart."""
        # by the header alone: what is no such file is refused before any tensor is read
        ours = self._own_metadata(file)
        if self.tensors is not None and (why := objection(file.tensors, self.tensors)) is not None:
            raise self.kind(f"{file.name} is no readable {self.name} file: {why}")
        tensors = {name: file.read(name) for name in file.tensors if name not in self.apart}
        stated = ours.pop(KEY + "checksum")
        found = checksum(ours, tensors)
        if found != stated:
            raise self.kind(
                f"{file.name} is damaged: its checksum is {found}, the file states {stated:.40}; copy it again, or "
                "make it again"
            )
        return {key: ours[KEY + key] for key in self.metadata}, tensors

    def is_in(self, source: str | os.PathLike[str] | ByteSource) -> bool:
        """Whether a file says that it is of this format, of any version."""
        try:
            with TensorFile(source, self.kind, most_header_bytes=self.most_header_bytes) as file:
                return KEY + self.name in file.metadata
        except self.kind:
            return False

    def to_bytes(self, metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> bytes:
        """The content of a file. Equal content is equal bytes.

        Raises:
            kind: when the tensors are not those of the format.
        """
        return tensors_to_bytes(self._complete(metadata, tensors), tensors)

    def write(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, str],
        tensors: Mapping[str, NDArray[Any]],
        *,
        overwrite: bool,
    ) -> Path:
        """Write a file: the whole file or nothing.

        Raises:
            kind: when `path` exists and `overwrite` is False, or it cannot be written: what was there is whole. When
                the tensors are not those of the format.
        """
        target = Path(path)
        complete = self._complete(metadata, tensors)
        with writing_named(target, self.kind):
            if target.exists() and not overwrite:
                raise self.kind(f"{target} already exists; pass another path, or overwrite=True to replace it")
            write_atomically(target, lambda file: write_tensors(file, complete, tensors), overwrite=overwrite)
        return target

    def _complete(self, metadata: Mapping[str, str], tensors: Mapping[str, NDArray[Any]]) -> dict[str, str]:
        """Metadata as they stand in the file."""
        if self.tensors is not None and (why := objection(tensors, self.tensors)) is not None:
            raise self.kind(f"this {self.name} file cannot be written: {why}")
        ours = {KEY + self.name: str(self.version), **{KEY + key: metadata[key] for key in self.metadata}}
        covered = {name: tensor for name, tensor in tensors.items() if name not in self.apart}
        return {**ours, KEY + "checksum": checksum(ours, covered)}

    def _own_metadata(self, file: TensorFile) -> dict[str, str]:
        version = file.metadata.get(KEY + self.name)
        if version is None:
            raise self.kind(f"{file.name} is no {self.name} file: its metadata lack {KEY + self.name}. {self.made_by}")
        if version != str(self.version):
            raise self.kind(
                f"{file.name} is a {self.name} file of version {version:.40}; this foreroute reads version "
                f"{self.version}. Make it again"
            )
        ours = {key: value for key, value in file.metadata.items() if key.startswith(KEY)}
        expected = {KEY + key for key in (self.name, *self.metadata, "checksum")}
        if set(ours) != expected:
            raise self.kind(
                f"{file.name} is no readable {self.name} file: its metadata are {few(ours)}; expected {few(expected)}"
            )
        return ours


def objection(
    tensors: Mapping[str, StoredTensor] | Mapping[str, NDArray[Any]], schemas: Mapping[str, TensorSchema]
) -> str | None:
    """What is wrong with the names, types and axes of tensors, looked at before any is read; None for nothing."""
    if set(tensors) != set(schemas):
        return f"its tensors are {few(tensors)}; expected {few(schemas)}"
    length_of: dict[str, tuple[int, str]] = {}
    for name, schema in schemas.items():
        tensor = tensors[name]
        if tensor.dtype not in [DTYPES[dtype] for dtype in schema.dtypes.split()]:
            return f"tensor {name} is {tensor.dtype}; expected {' or '.join(schema.dtypes.split())}"
        if len(tensor.shape) != len(schema.axes):
            return f"tensor {name} has the shape {list(tensor.shape)}; expected [{', '.join(schema.axes)}]"
        for axis, length in zip(schema.axes, tensor.shape, strict=True):
            first, where = length_of.setdefault(axis, (length, name))
            if length != first:
                return f"tensor {name} has {length} along {axis}, and {where} has {first}; expected the same"
    return None
