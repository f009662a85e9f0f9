#!/usr/bin/env python3
"""Compiles the device code into one compressed archive per target, with a manifest.

    python3 kernels/cuda/compile.py [name ...]     compiles all source files, or only these
    python3 kernels/cuda/compile.py --unpack DIR   unpacks the compiled files of all targets to DIR

Needs Python 3 with pip and a package index, but no GPU: the pinned compiler is installed from PyPI
into target/device-code. `compiled/` is committed. `kernels/tests/device_code.rs` fails if it no
longer matches the sources.
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
# Compiled files before they are packed, such as `rms_norm.sm_80.ptx`.
UNPACKED = TOOLS / "compiled"
# `device_code.rs` reads these lists as text: one wheel per line, one target per line.
WHEELS = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]
COMMON = ["-std=c++17", "-O3", "-Iinclude"]
# Compiler options by the end of the compiled file's name. Turing (sm_75) supports only f16. The PTX
# of sm_80 runs on all later GPUs. sm_89 is the first target with FP8 tensor cores. sm_90a is
# Hopper-specific.
TARGETS = {
    "sm_75.ptx": ["-arch=compute_75", "-DBURSAR_NO_BF16", "-ptx"],
    "sm_80.ptx": ["-arch=compute_80", "-ptx"],
    "sm_89.ptx": ["-arch=compute_89", "-ptx"],
    "sm_90a.cubin": ["-gencode=arch=compute_90a,code=sm_90a", "-cubin"],
}
# Targets that a source is compiled for only if it names them. A source with a line
# `// Targets: sm_90a` is compiled for the named targets only; any other source is compiled for all
# targets except these.
NAMED_ALONE = ["sm_89.ptx"]
ONLY = re.compile(r"^// Targets: (.+)$", re.MULTILINE)
# The PTX version of CUDA 12.4, whose driver is the oldest supported one. The compiler declares its
# own, newer version, which is replaced by this one; `ptxas` checks that the code uses nothing
# newer.
PTX_VERSION = "8.4"


def compiler():
    """The folder of the pinned compiler, which is installed if it is missing."""
    marker = TOOLS / "wheels"
    if not marker.exists() or marker.read_text() != "\n".join(WHEELS):
        venv.create(TOOLS / "venv", with_pip=True, clear=True)
        subprocess.run([TOOLS / "venv/bin/pip", "install", "--quiet", *WHEELS], check=True)
        marker.write_text("\n".join(WHEELS))
    return next((TOOLS / "venv/lib").glob("python3*/site-packages/nvidia/cu13"))


def sources_of(source):
    """The file and all files of this folder that it includes, sorted by path."""
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
    """A source without comments, trailing spaces and empty lines.

    Lines with a quote, a block comment or a continuation stay as they are, as does the line after a continuation.
    """
    kept, continues = [], False
    for line in text.split("\n"):
        is_comment = line.lstrip().startswith("//")
        is_special = continues or line.endswith("\\") or "/*" in line or "*/" in line or ('"' in line and not is_comment)
        line = line if is_special else line.split("//")[0].rstrip()
        continues = line.endswith("\\")
        if line or is_special:
            kept.append(line + "\n")
    return "".join(kept)


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
    """Compiler and options as text, for the manifest."""
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
        # The names of file-local symbols contain a hash of the folder in which the compiler ran.
        local = rf"(?<=_)[0-9a-f]{{8}}(?=_{len(source.stem) + 3}_{source.stem}_cu_)"
        text = re.sub(local, "0" * 8, text)
        # Comments contain paths of this build.
        out.write_text("\n".join(line for line in text.splitlines() if not line.startswith("//")) + "\n")
        arch = ending.removesuffix(".ptx")
        check = [cuda / "bin/ptxas", f"-arch={arch}", out, "-o", os.devnull]
        done = subprocess.run(check, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            return f"{out.name} is not PTX {PTX_VERSION}:\n{done.stdout}{done.stderr}"
    return None


def archive_of(ending):
    """Path of the archive for a target: `sm_80.ptx` -> `compiled/sm_80.tar.xz`."""
    return COMPILED / f"{ending.split('.')[0]}.tar.xz"


def read(archive):
    """The contents of an archive's files by name."""
    with tarfile.open(archive) as files:
        return {member.name: files.extractfile(member).read() for member in files}


def unpack(folder):
    """Writes the files of all archives to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for archive in sorted(COMPILED.glob("*.tar.xz")):
        for name, content in read(archive).items():
            (folder / name).write_bytes(content)


def pack(ending, files):
    """Writes a target's archive, unless it already contains exactly these files.

    Another version of liblzma may compress the same files to different bytes.
    """
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
    # Files of an earlier run would be mistaken for files of the archives.
    shutil.rmtree(UNPACKED, ignore_errors=True)
    unpack(UNPACKED)
    sources = sorted(HERE.glob("*.cu"))
    unknown = set(sys.argv[1:]) - {source.stem for source in sources}
    if unknown:
        sys.exit(f"no source file for {', '.join(sorted(unknown))} in {HERE}")
    asked = [source for source in sources if not sys.argv[1:] or source.stem in sys.argv[1:]]
    # A source with a new target is compiled for all of its targets, because the manifest has one
    # digest per source.
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
    # Only files of current sources and targets are packed: an archive may contain a file whose
    # source was deleted.
    for ending in TARGETS:
        pack(ending, [UNPACKED / f"{source.stem}.{ending}" for source in sources if ending in endings_of(source)])
    manifest.write_text(json.dumps({"options": options(), "files": files}, indent=1) + "\n")
    total = sum(file.stat().st_size for file in COMPILED.iterdir())
    print(f"{len(wanted)} source files compiled, {total / 2**20:.2f} MiB in all archives")


if __name__ == "__main__":
    main()
