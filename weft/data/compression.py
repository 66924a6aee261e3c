"""Compressed files: from a path to an open file of what it unpacks to.

The format is known by a file's first bytes, or else by the end of its name. gzip, bzip2 and xz are read by
the standard library, Zstandard by the package `zstandard` if that is installed. Files are unpacked into
temporary ones, so that any place in them can be read again.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from weft.core.errors import DataError

CHUNK_BYTES = 1 << 20  # bytes unpacked at once
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)  # what unpacking a damaged file raises


@dataclass(frozen=True)
class CompressionFormat:
    """A compressed format.

    Attributes:
      name: what it is called.
      suffix: how the names of such files end.
      starts: how their contents begin, as no text does.
      unpack: from a path into an open file; None: it can't be read.
    """

    name: str
    suffix: str
    starts: tuple[bytes, ...]
    unpack: Callable[[str, IO[bytes]], None] | None = None


def open_decompressed(path: str) -> IO[bytes]:
    """The file, or a temporary one with what it unpacks to; whoever reads it closes it."""
    file = open(path, "rb")  # noqa: SIM115
    start = file.read(16)
    file.seek(0)
    found = next((one for one in FORMATS if start.startswith(one.starts)), None)
    found = found or next((one for one in FORMATS if path.endswith(one.suffix)), None)
    if found is None:
        return file
    file.close()
    if found.unpack is None:
        raise DataError(
            f"{path} is a {found.name} file",
            rule=f"data are text, plain or compressed by {', '.join(f.name for f in FORMATS if f.unpack)}",
            hint="unpack it first",
        )
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        found.unpack(path, unpacked)
    except BaseException as error:
        unpacked.close()
        if not isinstance(error, DECOMPRESSION_ERRORS):
            raise
        raise DataError(
            f"{path} can't be unpacked",
            str(error),
            rule=f"a {found.name} file, by its first bytes or its name (*{found.suffix}), is complete",
            hint="download it again, or rename it if it is plain text",
        ) from None
    unpacked.seek(0)
    return unpacked


def _by(open_packed: Callable[[str], Any]) -> Callable[[str, IO[bytes]], None]:
    def unpack(path: str, into: IO[bytes]) -> None:
        with open_packed(path) as packed:
            shutil.copyfileobj(packed, into, CHUNK_BYTES)

    return unpack


def _zstandard(path: str, into: IO[bytes]) -> None:
    try:
        import zstandard
    except ImportError:
        raise DataError(
            f"{path} is a Zstandard file, and the package zstandard is not installed",
            rule="Zstandard files are read with that package; gzip, bzip2 and xz need none",
            hint="pip install zstandard, or unpack the file first: zstd -d FILE",
        ) from None
    # Not zstandard.open: it stops after the first of several frames, and at a cut without an error.
    unpacker = zstandard.ZstdDecompressor()
    frame = unpacker.decompressobj()
    with open(path, "rb") as packed:
        is_begun = False
        while chunk := packed.read(CHUNK_BYTES):
            while chunk:
                if frame.eof:
                    frame = unpacker.decompressobj()
                try:
                    into.write(frame.decompress(chunk))
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None
                is_begun, chunk = True, frame.unused_data if frame.eof else b""
    if is_begun and not frame.eof:
        raise EOFError("the file ended before the end of its last frame")


FORMATS = (
    CompressionFormat("gzip", ".gz", (b"\x1f\x8b",), _by(gzip.open)),
    CompressionFormat(
        "bzip2", ".bz2", tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), _by(bz2.open)
    ),
    CompressionFormat("xz", ".xz", (b"\xfd7zXZ\0",), _by(lzma.open)),
    CompressionFormat("Zstandard", ".zst", (b"\x28\xb5\x2f\xfd",), _zstandard),
    CompressionFormat("ZIP", ".zip", (b"PK\x03\x04",)),
    CompressionFormat("LZ4", ".lz4", (b"\x04\x22\x4d\x18",)),
)
