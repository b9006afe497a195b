"""An archive has the blobs that its index names, and the same files give the same image."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

from container.oci_archive import fill_from_folder, kept_layer, write_archive, write_layer


def test_every_blob_of_an_archive_is_named_by_its_content(tmp_path: Path) -> None:
    layer = write_layer(tmp_path / "layer", fill_from_folder(some_folder(tmp_path), owned={"/data": 10001}))
    write_archive(tmp_path / "image.tar", "localhost/x:1", [layer], {"User": "10001"})
    blobs = {}
    with tarfile.open(tmp_path / "image.tar") as tar:
        for member in tar:
            blobs[member.name] = tar.extractfile(member).read()  # type: ignore[union-attr]
    assert all(name.endswith(hashlib.sha256(blob).hexdigest()) for name, blob in blobs.items() if name.startswith("blobs/"))
    (entry,) = json.loads(blobs["index.json"])["manifests"]
    manifest = json.loads(blobs[blob_path(entry["digest"])])
    config = json.loads(blobs[blob_path(manifest["config"]["digest"])])
    (packed,) = (blobs[blob_path(described["digest"])] for described in manifest["layers"])
    assert config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(gzip.decompress(packed)).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        owners = {member.name: (member.uid, oct(member.mode)) for member in tar}
    assert owners == {"bin": (0, "0o755"), "bin/run": (0, "0o755"), "data": (10001, "0o755"), "text": (0, "0o644")}


def test_the_same_files_give_the_same_layer(tmp_path: Path) -> None:
    first = write_layer(tmp_path / "a", fill_from_folder(some_folder(tmp_path / "1")))
    second = write_layer(tmp_path / "b", fill_from_folder(some_folder(tmp_path / "2")))
    assert (first.digest, first.size_bytes) == (second.digest, second.size_bytes)


def test_a_kept_layer_is_not_packed_again(tmp_path: Path) -> None:
    packed = []
    fill = fill_from_folder(some_folder(tmp_path))
    layers = [kept_layer(tmp_path / "layer", lambda stream: packed.append(fill(stream))) for _ in range(2)]
    assert layers[0] == layers[1]
    assert len(packed) == 1


def some_folder(parent: Path) -> Path:
    root = parent / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/run").write_text("#!/bin/sh\n")
    (root / "bin/run").chmod(0o755)
    (root / "text").write_text("hello")
    (root / "text").chmod(0o644)
    return root


def blob_path(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"
