#!/usr/bin/env python3
"""Compiles the device code into one compressed archive per target, with a manifest of sources and outputs.

    python3 kernels/cuda/compile.py [name ...]     all source files, or only these
    python3 kernels/cuda/compile.py --unpack DIR   writes the compiled files of all targets to DIR, to look at them

Needs Python 3 with pip and a package index, and no GPU: the pinned compiler comes from PyPI into target/device-code.
`compiled/` is committed. `kernels/tests/device_code.rs` fails when it no longer matches the sources.
"""

import concurrent.futures
import hashlib
import io
import json
import lzma
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import venv

HERE = pathlib.Path(__file__).resolve().parent
COMPILED = HERE / "compiled"
TOOLS = HERE.parent.parent / "target" / "device-code"
# Compiled files before they are packed, for instance `rms_norm.sm_80.ptx`.
UNPACKED = TOOLS / "compiled"
# `device_code.rs` reads these lists as text: one wheel a line, one target a line.
WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
COMMON = ["-std=c++17", "-O3", "-Iinclude"]
# By the end of the compiled file's name. Turing has f16 alone; sm_80's PTX is the floor for all that follows; sm_89 is the
# first that multiplies FP8; sm_90a is Hopper's own.
TARGETS = {
    "sm_75.ptx": ["-arch=compute_75", "-DBURSAR_NO_BF16", "-ptx"],
    "sm_80.ptx": ["-arch=compute_80", "-ptx"],
    "sm_89.ptx": ["-arch=compute_89", "-ptx"],
    "sm_90a.cubin": ["-gencode=arch=compute_90a,code=sm_90a", "-cubin"],
}
# A file that is for others than all but these says so in a line `// Targets: sm_90a`.
NAMED_ALONE = ["sm_89.ptx"]
ONLY = re.compile(r"^// Targets: (.+)$", re.MULTILINE)
# The PTX language of CUDA 12.4, the oldest driver that is served. The compiler writes its own, newer version; what it
# wrote uses nothing newer, which `ptxas` confirms.
PTX_VERSION = "8.4"


def compiler():
    """The folder of the pinned compiler, installed if it is not there."""
    marker = TOOLS / "wheels"
    if not marker.exists() or marker.read_text() != "\n".join(WHEELS):
        venv.create(TOOLS / "venv", with_pip=True, clear=True)
        subprocess.run([TOOLS / "venv/bin/pip", "install", "--quiet", *WHEELS], check=True)
        marker.write_text("\n".join(WHEELS))
    return next((TOOLS / "venv/lib").glob("python3*/site-packages/nvidia/cu13"))


def sources_of(source):
    """The file and all of ours that it includes, sorted by path."""
    found, left = set(), [source]
    while left:
        file = left.pop()
        if file in found:
            continue
        found.add(file)
        for name in re.findall(r'^\s*#include "([^"]+)"', file.read_text(), re.MULTILINE):
            left.append(next(place for place in (file.parent / name, HERE / "include" / name) if place.exists()))
    return sorted(found)


def code_of(text):
    """A source without comments, trailing spaces and empty lines. A comment after code stays if the line has a quote."""
    lines = (line if '"' in line and not line.lstrip().startswith("//") else line.split("//")[0] for line in text.split("\n"))
    return "".join(f"{line.rstrip()}\n" for line in lines if line.strip())


def digest_of_sources(source):
    """Digest of the code, the options and the compiler. `device_code.rs` computes the same digest."""
    digest = hashlib.sha256()
    for file in sources_of(source):
        digest.update(f"{file.relative_to(HERE).as_posix()}\n{code_of(file.read_text())}".encode())
    digest.update(options().encode())
    return digest.hexdigest()


def endings_of(source):
    """The targets that the file is compiled for."""
    only = ONLY.search(source.read_text())
    if not only:
        return [ending for ending in TARGETS if ending not in NAMED_ALONE]
    return [ending for ending in TARGETS if ending.split(".")[0] in only[1].split(", ")]


def options():
    """Compiler and options as text; it stands in the manifest."""
    targets = [" ".join([ending, *arguments]) for ending, arguments in TARGETS.items()]
    return "\n".join([*WHEELS, " ".join(COMMON), *targets, PTX_VERSION])


def compile_one(cuda, source, ending):
    out = UNPACKED / f"{source.stem}.{ending}"
    environment = {**os.environ, "CUDA_HOME": str(cuda)}
    command = [cuda / "bin/nvcc", *COMMON, *TARGETS[ending], source.name, "-o", out]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        return f"{source.name} for {ending}:\n{done.stdout}{done.stderr}"
    if ending.endswith(".ptx"):
        text = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", out.read_text(), count=1, flags=re.MULTILINE)
        # What is local to a file is named after a hash of the folder that it was compiled in.
        local = rf"(?<=_)[0-9a-f]{{8}}(?=_{len(source.stem) + 3}_{source.stem}_cu_)"
        text = re.sub(local, "0" * 8, text)
        # Comments hold the build's own paths.
        out.write_text("\n".join(line for line in text.splitlines() if not line.startswith("//")) + "\n")
        arch = ending.removesuffix(".ptx")
        check = [cuda / "bin/ptxas", f"-arch={arch}", out, "-o", os.devnull]
        done = subprocess.run(check, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return f"{out.name} is not PTX {PTX_VERSION}:\n{done.stdout}{done.stderr}"
    return None


def archive_of(ending):
    """The archive with all compiled files of a target: `sm_80.ptx` -> `compiled/sm_80.tar.xz`."""
    return COMPILED / f"{ending.split('.')[0]}.tar.xz"


def read(archive):
    """The files of an archive by name."""
    with tarfile.open(archive) as files:
        return {member.name: files.extractfile(member).read() for member in files}


def unpack(folder):
    """Writes the files of all archives to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive in sorted(COMPILED.glob("*.tar.xz")):
        for name, content in read(archive).items():
            (folder / name).write_bytes(content)


def pack(ending, files):
    """Writes a target's archive, unless it has these files: another liblzma may give other bytes for the same ones."""
    contents = {file.name: file.read_bytes() for file in files}
    if archive_of(ending).exists() and read(archive_of(ending)) == contents:
        return
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(contents):
            member = tarfile.TarInfo(name)
            member.size = len(contents[name])
            archive.addfile(member, io.BytesIO(contents[name]))
    archive_of(ending).write_bytes(lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def main():
    if sys.argv[1:2] == ["--unpack"]:
        return unpack(pathlib.Path(sys.argv[2]))
    cuda = compiler()
    COMPILED.mkdir(exist_ok=True)
    # Files of an earlier run would pass for those of the archives.
    shutil.rmtree(UNPACKED, ignore_errors=True)
    unpack(UNPACKED)
    sources = sorted(HERE.glob("*.cu"))
    unknown = set(sys.argv[1:]) - {source.stem for source in sources}
    if unknown:
        sys.exit(f"no source file for {', '.join(sorted(unknown))} in {HERE}")
    asked = [source for source in sources if not sys.argv[1:] or source.stem in sys.argv[1:]]
    # A source with a new target is compiled for all: the manifest has one digest of it.
    lacks = [
        source
        for source in sources
        if any(not (UNPACKED / f"{source.stem}.{ending}").exists() for ending in endings_of(source))
    ]
    wanted = sorted({*asked, *lacks})
    jobs = [(source, ending) for source in wanted for ending in endings_of(source)]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        errors = [error for error in pool.map(lambda job: compile_one(cuda, *job), jobs) if error]
    if errors:
        sys.exit("\n".join(errors))
    manifest = COMPILED / "manifest.json"
    known = json.loads(manifest.read_text())["files"] if manifest.exists() else {}
    files = {source.stem: known.get(source.stem) for source in sources}
    for source in wanted:
        outputs = {
            ending: hashlib.sha256((UNPACKED / f"{source.stem}.{ending}").read_bytes()).hexdigest()
            for ending in endings_of(source)
        }
        files[source.stem] = {"sources": digest_of_sources(source), "compiled": outputs}
    # Only files of current sources and targets are packed: an archive may hold a file whose source is gone.
    for ending in TARGETS:
        pack(ending, [UNPACKED / f"{source.stem}.{ending}" for source in sources if ending in endings_of(source)])
    manifest.write_text(json.dumps({"options": options(), "files": files}, indent=1) + "\n")
    total = sum(file.stat().st_size for file in COMPILED.iterdir())
    print(f"{len(wanted)} source files compiled, {total / 2**20:.2f} MiB in all archives")


if __name__ == "__main__":
    main()
