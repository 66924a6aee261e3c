"""Compressed files: from a path to an open file with the decompressed contents.

The format is detected from a file's first bytes, or else from its suffix. The standard library reads gzip,
bzip2 and xz; the package `zstandard`, of the extra zstd, reads Zstandard. Files are decompressed into
temporary files, so that they can be read at random positions.
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
from weft.core.extras import from_extra

CHUNK_BYTES = 1 << 20  # decompressed at a time
DECOMPRESSION_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)  # raised for a damaged file


@dataclass(frozen=True)
class CompressionFormat:
    """A compressed file format.

    Attributes:
      name: the format's name.
      suffix: the suffix of its files.
      magic: the first bytes of its files; no text starts like this.
      decompress: from a path into an open file; None if the format is not supported.
    """

    name: str
    suffix: str
    magic: tuple[bytes, ...]
    decompress: Callable[[str, IO[bytes]], None] | None = None


def open_decompressed(path: str) -> IO[bytes]:
    """Open a file, or a temporary file with its decompressed contents. The caller closes it."""
    file = open(path, "rb")  # noqa: SIM115
    start = file.read(16)
    file.seek(0)
    found = next((one for one in FORMATS if start.startswith(one.magic)), None)
    found = found or next((one for one in FORMATS if path.endswith(one.suffix)), None)
    if found is None:
        return file
    file.close()
    if found.decompress is None:
        supported = ", ".join(one.name for one in FORMATS if one.decompress)
        raise DataError(
            f"{path} is a {found.name} file",
            rule=f"data files are plain text, or text compressed with {supported}",
            hint="unpack it first",
        )
    decompressed = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        found.decompress(path, decompressed)
    except BaseException as error:
        decompressed.close()
        if not isinstance(error, DECOMPRESSION_ERRORS):
            raise
        raise DataError(
            f"can't decompress {path}",
            str(error),
            rule=f"a {found.name} file (detected by its first bytes or by *{found.suffix}) must be complete",
            hint="download it again, or rename it if it is plain text",
        ) from None
    decompressed.seek(0)
    return decompressed


def _copy_from(
    open_compressed: Callable[[str], Any],
) -> Callable[[str, IO[bytes]], None]:
    def decompress(path: str, into: IO[bytes]) -> None:
        with open_compressed(path) as compressed:
            shutil.copyfileobj(compressed, into, CHUNK_BYTES)

    return decompress


def _zstandard(path: str, into: IO[bytes]) -> None:
    with from_extra("zstd"):
        import zstandard
    # zstandard.open stops after the first of several frames, and raises no error for a truncated file.
    decompressor = zstandard.ZstdDecompressor()
    frame = decompressor.decompressobj()
    with open(path, "rb") as compressed:
        started = False
        while chunk := compressed.read(CHUNK_BYTES):
            while chunk:
                if frame.eof:
                    frame = decompressor.decompressobj()
                try:
                    into.write(frame.decompress(chunk))
                except zstandard.ZstdError as error:
                    raise OSError(str(error)) from None
                started, chunk = True, frame.unused_data if frame.eof else b""
    if started and not frame.eof:
        raise EOFError("the file ends before the end of its last frame")


FORMATS = (
    CompressionFormat("gzip", ".gz", (b"\x1f\x8b",), _copy_from(gzip.open)),
    CompressionFormat(
        "bzip2", ".bz2", tuple(b"BZh%d1AY&SY" % level for level in range(1, 10)), _copy_from(bz2.open)
    ),
    CompressionFormat("xz", ".xz", (b"\xfd7zXZ\0",), _copy_from(lzma.open)),
    CompressionFormat("Zstandard", ".zst", (b"\x28\xb5\x2f\xfd",), _zstandard),
    CompressionFormat("ZIP", ".zip", (b"PK\x03\x04",)),
    CompressionFormat("LZ4", ".lz4", (b"\x04\x22\x4d\x18",)),
)
