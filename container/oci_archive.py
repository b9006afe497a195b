"""Write a container image as an OCI archive: one tar that podman, docker, skopeo and containerd import.

    index.json ──► manifest ──┬─► config    environment, user, entry point, labels
                              └─► layers    tar.gz each, applied in order

Blobs are named by the SHA-256 of their content. The same files give the same image: times, owners and order are fixed here.
Format: OCI image specification 1.1, image-layout.md and layer.md.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

MEDIA = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
GZIP_LEVEL = 6
CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """A compressed layer on disk. `diff_id` is the digest of the tar before compression, which the config lists."""

    path: str
    digest: str
    diff_id: str
    size_bytes: int


class _HashingWriter(io.RawIOBase):
    """Passes bytes on and keeps their digest and count."""

    def __init__(self, sink: IO[bytes]) -> None:
        self._sink = sink
        self._sha256 = hashlib.sha256()
        self.size_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sha256.update(data)
        self.size_bytes += len(data)
        return self._sink.write(data)

    @property
    def digest(self) -> str:
        return f"sha256:{self._sha256.hexdigest()}"


def write_layer(path: Path, fill: Callable[[IO[bytes]], None]) -> Layer:
    """Write one layer to `path`; `fill` gets a stream and writes an uncompressed tar to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        compressed = _HashingWriter(file)
        with gzip.GzipFile(filename="", mode="wb", compresslevel=GZIP_LEVEL, fileobj=compressed, mtime=0) as packer:
            plain = _HashingWriter(packer)  # type: ignore[arg-type]
            fill(plain)  # type: ignore[arg-type]
    part.rename(path)
    return Layer(str(path), compressed.digest, plain.digest, compressed.size_bytes)


def kept_layer(path: Path, fill: Callable[[IO[bytes]], None]) -> Layer:
    """Return the layer that an earlier run left at `path`, or write it. The name of `path` must depend on its content."""
    about = path.with_name(path.name + ".json")
    if about.exists() and path.exists():
        return Layer(**json.loads(about.read_text()))
    layer = write_layer(path, fill)
    about.write_text(json.dumps(asdict(layer)))
    return layer


def fill_from_tar(source: Path) -> Callable[[IO[bytes]], None]:
    def fill(stream: IO[bytes]) -> None:
        with source.open("rb") as file:
            shutil.copyfileobj(file, stream, CHUNK_BYTES)

    return fill


def fill_from_folder(root: Path, *, owned: Mapping[str, int] | None = None) -> Callable[[IO[bytes]], None]:
    """Pack all below `root`, owned by root and without times. `owned` adds empty folders with the user that owns each."""

    def fill(stream: IO[bytes]) -> None:
        with tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(root.rglob("*")):
                member = tar.gettarinfo(path, str(path.relative_to(root)))
                member.uid = member.gid = member.mtime = 0
                member.uname = member.gname = ""
                if member.isdir():
                    member.mode = 0o755
                with path.open("rb") if member.isreg() else io.BytesIO() as content:
                    tar.addfile(member, content if member.isreg() else None)
            for name, user in (owned or {}).items():
                member = tarfile.TarInfo(name.strip("/"))
                member.type, member.mode, member.uid, member.gid = tarfile.DIRTYPE, 0o755, user, user
                tar.addfile(member)

    return fill


def write_archive(path: Path, name: str, layers: Sequence[Layer], config: Mapping[str, Any]) -> int:
    """Write the archive and return how many bytes it has. `name` is repository and tag; `config` has the keys of the OCI config."""
    image = {
        "architecture": ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for layer in layers]},
    }
    config_blob, config_text = _blob(image, "config.v1+json")
    described = [{"mediaType": f"{MEDIA}.layer.v1.tar+gzip", "digest": layer.digest, "size": layer.size_bytes} for layer in layers]
    manifest = {"schemaVersion": 2, "mediaType": f"{MEDIA}.manifest.v1+json", "config": config_blob, "layers": described}
    manifest_blob, manifest_text = _blob(manifest, "manifest.v1+json")
    # containerd takes the whole name from its own annotation; podman and skopeo read the standard one.
    manifest_blob["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    index = {"schemaVersion": 2, "mediaType": f"{MEDIA}.index.v1+json", "manifests": [manifest_blob]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with tarfile.open(part, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", json.dumps(index).encode())
        _add(tar, _blob_path(config_blob["digest"]), config_text)
        _add(tar, _blob_path(manifest_blob["digest"]), manifest_text)
        for layer in {layer.digest: layer for layer in layers}.values():
            member = tarfile.TarInfo(_blob_path(layer.digest))
            member.size, member.mode = layer.size_bytes, 0o644
            with Path(layer.path).open("rb") as file:
                tar.addfile(member, file)
    os.replace(part, path)
    return path.stat().st_size


def _blob(content: Mapping[str, Any], media: str) -> tuple[dict[str, Any], bytes]:
    text = json.dumps(content).encode()
    digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
    return {"mediaType": f"{MEDIA}.{media}", "digest": digest, "size": len(text)}, text


def _blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), 0o644
    tar.addfile(member, io.BytesIO(content))
