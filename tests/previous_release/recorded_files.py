"""The files of the recorded data, and how they are packed."""

from __future__ import annotations

import json
import lzma
import os
import tarfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STANDALONE = HERE / "standalone.tar.xz"
EXPECTED = HERE / "expected.json"
ZOOKEEPER = HERE / "zookeeper.json.xz"

_LEFT_OUT = ("LOG", "LOG.old", "LOCK")
"""RocksDB's own log names paths of the recording machine; locks are created again."""
_BLOCK_BYTES = 1 << 20


def pack_directory(directory: Path, archive: Path) -> None:
    """Pack the files below `directory`, without the names of users and machines."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        name = Path(member.name).name
        if name in _LEFT_OUT or name.startswith("LOG.old"):
            return None
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(archive, "w:xz", preset=9) as tar:
        tar.add(directory, arcname=".", filter=anonymous)


def unpack_directory(archive: Path, directory: Path) -> None:
    """Unpack into a new directory. Blocks of zeros, most of a preallocated journal, become holes."""
    with tarfile.open(archive, "r:xz") as tar:
        for member in tar:
            path = directory / member.name
            if member.isdir():
                path.mkdir(parents=True)
                continue
            content = tar.extractfile(member)
            assert content is not None, f"{member.name} is not a file"
            with path.open("wb") as file:
                while block := content.read(_BLOCK_BYTES):
                    if block.count(0) < len(block):
                        file.write(block)
                    else:
                        file.seek(len(block), os.SEEK_CUR)
                file.truncate(member.size)


def save_json(value: Any, path: Path) -> None:
    """Write JSON: compressed when the name ends in .xz, otherwise with one line for each item of a list."""
    if path.suffix == ".xz":
        path.write_bytes(lzma.compress(json.dumps(value, ensure_ascii=False, indent=1).encode(), preset=9))
    else:
        path.write_text(_laid_out(value, "") + "\n")


def load_json(path: Path) -> Any:
    content = path.read_bytes()
    return json.loads(lzma.decompress(content) if path.suffix == ".xz" else content)


def _laid_out(value: Any, indent: str) -> str:
    inner = indent + " "
    if isinstance(value, dict) and any(isinstance(item, dict | list) for item in value.values()):
        items = [f"{json.dumps(name, ensure_ascii=False)}: {_laid_out(item, inner)}" for name, item in value.items()]
        return "{\n" + ",\n".join(inner + item for item in items) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return "[\n" + ",\n".join(inner + json.dumps(item, ensure_ascii=False) for item in value) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False)
