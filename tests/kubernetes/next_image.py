"""Make an image of a later release out of the one that is tested: `write_next_image`.

The same layers and one more, in which metadata knows the next storage format. So an upgrade to it replaces all pods, a rollback
works until `cepheid cluster finish-upgrade`, and the first image refuses to start after that.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

from container.oci_archive import Layer, fill_from_folder, write_archive, write_layer

MODULE = "cepheid_metadata/upgrade.py"
FORMAT = re.compile(r"^NEWEST_STORAGE_FORMAT = (\d+)$", re.MULTILINE)


def write_next_image(source: Path, target: Path, name: str) -> None:
    """Write the archive of the later release; `source` is that of the image which is tested."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(source) as archive:
        blobs = Path(folder)
        for member in archive.getmembers():
            if member.isfile() and member.name.startswith("blobs/"):
                content = archive.extractfile(member)
                assert content is not None
                (blobs / Path(member.name).name).write_bytes(content.read())

        def blob(described: dict[str, Any]) -> bytes:
            return (blobs / described["digest"].partition(":")[2]).read_bytes()

        index = archive.extractfile("index.json")
        assert index is not None
        manifest = json.loads(blob(json.load(index)["manifests"][0]))
        image = json.loads(blob(manifest["config"]))
        layers = [
            Layer(str(blobs / layer["digest"].partition(":")[2]), layer["digest"], diff_id, layer["size"])
            for layer, diff_id in zip(manifest["layers"], image["rootfs"]["diff_ids"], strict=True)
        ]
        root = blobs / "next"
        with tarfile.open(fileobj=io.BytesIO(blob(manifest["layers"][-1])), mode="r:gz") as packed:
            (member,) = [member for member in packed.getmembers() if member.name.endswith(MODULE)]
            changed = root / member.name
            changed.parent.mkdir(parents=True)
            changed.write_text(with_next_format(packed.extractfile(member)))
            # A whiteout of the compiled module, which may not be compared with its source.
            compiled = changed.parent / "__pycache__"
            compiled.mkdir()
            for found in packed.getnames():
                if re.search(r"cepheid_metadata/__pycache__/upgrade\.[^/]+\.pyc$", found):
                    (compiled / f".wh.{Path(found).name}").touch()
        layers.append(write_layer(blobs / "next.layer", fill_from_folder(root)))
        labels = {**image["config"].get("Labels", {}), "org.opencontainers.image.version": "next"}
        write_archive(target, name, layers, {**image["config"], "Labels": labels})


def with_next_format(module: IO[bytes] | None) -> str:
    assert module is not None
    text = module.read().decode()
    changed, count = FORMAT.subn(lambda found: f"NEWEST_STORAGE_FORMAT = {int(found[1]) + 1}", text)
    assert count == 1, f"{MODULE} does not say which storage format is the newest"
    return changed
