"""Packs recorded folders into `tests/golden/<folder>.tar.xz` and unpacks them, with the standard library only.

An archive is deterministic: members are sorted by name and have no time, owner or permissions of the machine. It is
rewritten only if the files in it changed, because another version of liblzma may compress the same files to other bytes.
"""

import io
import lzma
import shutil
import tarfile
from pathlib import Path

ARCHIVES = Path(__file__).parents[1]
# Small tables that stay readable in a checkout and in a diff.
PLAIN_FILES = ("config_defaults.json", "smart_resize.json", "tiles.json")


def compress(files):
    """The bytes of the archive of `files`: contents by member name."""
    tar_bytes = io.BytesIO()
    with tarfile.open(fileobj=tar_bytes, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(files):
            member = tarfile.TarInfo(name)  # mtime, uid and gid are 0, owner names are empty
            member.size, member.mode = len(files[name]), 0o644
            tar.addfile(member, io.BytesIO(files[name]))
    # `lp` and `pb` of 2: the coder uses positions modulo four bytes, because most content is f32.
    words = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 2}
    return lzma.compress(tar_bytes.getvalue(), lzma.FORMAT_XZ, lzma.CHECK_CRC32, filters=[words])


def read_archive(path):
    """Contents by member name, each `<folder>/…`."""
    folder = path.name.removesuffix(".tar.xz")
    files = {}
    with tarfile.open(path, "r:xz") as tar:
        for member in tar:
            if member.isdir():
                continue
            inner = Path(member.name)
            if not member.isfile() or inner.parts[0] != folder or ".." in inner.parts:
                raise ValueError(f"{path}: {member.name} is not a file below {folder}/")
            files[member.name] = tar.extractfile(member).read()
    return files


def read_file(name, archives=ARCHIVES):
    """The bytes of one recorded file, for example `qwen2_5_vl/config.json`."""
    if name in PLAIN_FILES:
        return (archives / name).read_bytes()
    return read_archive(archives / f"{name.split('/')[0]}.tar.xz")[name]


def unpack_folder(folder, into, archives=ARCHIVES):
    """Replaces `into/<folder>` with the files of its archive."""
    shutil.rmtree(into / folder, ignore_errors=True)
    for name, content in read_archive(archives / f"{folder}.tar.xz").items():
        path = into / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def unpack(into, archives=ARCHIVES):
    """Unpacks every archive and copies the plain files, so that `into` has all recorded files."""
    into.mkdir(parents=True, exist_ok=True)
    for path in sorted(archives.glob("*.tar.xz")):
        unpack_folder(path.name.removesuffix(".tar.xz"), into, archives)
    for name in PLAIN_FILES:
        if (archives / name).exists():
            shutil.copyfile(archives / name, into / name)


def pack(source, archives=ARCHIVES):
    """Packs each folder of `source` and copies the plain files. Prints what it wrote, and archives without a folder."""
    archives.mkdir(parents=True, exist_ok=True)
    folders = sorted(path for path in source.iterdir() if path.is_dir())
    for folder in folders:
        paths = (path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(source).as_posix(): path.read_bytes() for path in paths}
        archive = archives / f"{folder.name}.tar.xz"
        if archive.exists() and read_archive(archive) == files:
            continue
        archive.write_bytes(compress(files))
        print(f"{archive.name}: {len(files)} files, {archive.stat().st_size:,} bytes")
    for name in PLAIN_FILES:
        if (source / name).exists():
            shutil.copyfile(source / name, archives / name)
    packed = {f"{folder.name}.tar.xz" for folder in folders}
    for path in sorted(archives.glob("*.tar.xz")):
        if path.name not in packed:
            print(f"{path.name}: {source} has no such folder; delete the archive if no part records this folder")
