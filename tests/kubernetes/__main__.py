"""The test node by hand, and the whole proof.

python -m tests.kubernetes build            the programs of Kubernetes, into the cache (once; minutes)
python -m tests.kubernetes helm             Helm alone, into the cache: tests/charts renders the chart with it
python -m tests.kubernetes up               start a node; prints what to put into the shell for kubectl and helm
python -m tests.kubernetes image ARCHIVE    give the node an image (python -m container makes one); kept for later nodes
python -m tests.kubernetes next             make the image of a later release from cepheid.tar, and give it to the node
python -m tests.kubernetes inside CMD ...   run a command in the network of the node, where pods and services have their names
python -m tests.kubernetes down [--keep]    stop it; --keep: the next `up` finds the same cluster, as after a power cut
python -m tests.kubernetes test [PYTEST OPTIONS]    all of it: build, image, node, the tests, and down
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.kubernetes import node_control
from tests.kubernetes.next_image import write_next_image
from tests.kubernetes.places import (
    BIN,
    HERE,
    IMAGE,
    IMAGES,
    KUBECONFIG,
    NEXT_IMAGE,
    REPOSITORY,
    SPARK_IMAGE,
    require_root,
    running_node,
)
from tests.kubernetes.programs import build_helm, build_programs, check_tools, missing_programs


def main(arguments: Sequence[str]) -> int:
    match arguments:
        case ["build"]:
            build_programs()
        case ["helm"]:
            if not (BIN / "helm").exists():
                build_helm()
        case ["up"]:
            node_control.start()
            print(f"export KUBECONFIG={shlex.quote(str(KUBECONFIG))} PATH={shlex.quote(str(BIN))}:$PATH")
        case ["image", archive]:
            add_image(Path(archive))
        case ["next"]:
            write_next_image(IMAGES / "cepheid.tar", IMAGES / "cepheid-next.tar", NEXT_IMAGE)
            if (node := running_node()) is not None:
                node_control.import_image(node, IMAGES / "cepheid-next.tar")
        case ["inside", *words] if words:
            require_root()
            if (node := running_node()) is None:
                sys.exit("no node is running: python -m tests.kubernetes up")
            command = node.command(*words)
            os.execvp(command[0], command)
        case ["down"] | ["down", "--keep"]:
            node_control.stop(keep="--keep" in arguments)
        case ["test", *options]:
            return test(options)
        case _:
            sys.exit(__doc__)
    return 0


def add_image(archive: Path) -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    kept = IMAGES / f"{archive.name.partition('.oci')[0].removesuffix('.tar')}.tar"
    shutil.copyfile(archive, kept)
    if (node := running_node()) is not None:
        node_control.import_image(node, kept)


def test(options: Sequence[str]) -> int:
    """Build what is missing, run the tests on a fresh node, and stop it. Returns the exit code of pytest."""
    require_root()
    check_tools()
    if missing_programs():
        build_programs()
    for name, extras, archive in (
        (IMAGE, "server,tiered", "cepheid.tar"),
        (SPARK_IMAGE, "server,tiered,spark", "cepheid-spark.tar"),
    ):
        command = [sys.executable, "-m", "container", "--builder=archive", f"--name={name}", f"--extras={extras}"]
        subprocess.run([*command, f"--archive={IMAGES / archive}"], cwd=REPOSITORY, check=True)
    write_next_image(IMAGES / "cepheid.tar", IMAGES / "cepheid-next.tar", NEXT_IMAGE)
    node_control.stop()
    node_control.start()
    try:
        command = [sys.executable, "-m", "pytest", "-v", "-x", "-p", "no:cacheprovider", "--timeout=2400", str(HERE), *options]
        return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "CEPHEID_KUBERNETES": "1"}).returncode
    finally:
        node_control.stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
