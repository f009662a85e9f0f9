#!/usr/bin/env python3
"""Records the golden reference cases with Hugging Face transformers and packs them into the archives of this folder.

    python3 make.py                          # records everything from a clean folder, about 40 s
    python3 make.py --only templates,gguf    # unpacks the archives, then records these parts (recording/parts.py)
    python3 make.py --unpack DIR             # unpacks all archives into DIR; the standard library is enough
    python3 make.py --pack-only DIR          # packs the folders of DIR; the standard library is enough

Recorded files are written to --folder and then packed. The same machine and versions give the same bytes each time. Another
CPU may round the last bits of f32 arrays differently. README.md lists the versions and describes the files.
"""

import argparse
import shutil
import sys
from pathlib import Path

from recording import archives

FOLDER = archives.ARCHIVES.parents[1] / "target/golden-recording"  # ignored by git


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--only", metavar="PARTS", help="record these parts, separated by commas")
    mode.add_argument("--unpack", type=Path, metavar="DIR", help="unpack the archives into DIR, and stop")
    mode.add_argument("--pack-only", type=Path, metavar="DIR", help="pack the folders of DIR, and stop")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where files are recorded (default: target/golden-recording)")
    parser.add_argument("--archives", type=Path, default=archives.ARCHIVES, help="where archives are (default: tests/golden)")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/golden"), help="downloaded packages (default: /tmp/golden)")
    return parser.parse_args()


def main():
    chosen = options()
    if chosen.unpack:
        return archives.unpack(chosen.unpack, chosen.archives)
    if chosen.pack_only:
        return archives.pack(chosen.pack_only, chosen.archives)
    from recording import parts  # torch and transformers

    names = chosen.only.split(",") if chosen.only else list(parts.PARTS)
    if unknown := [name for name in names if name not in parts.PARTS]:
        sys.exit(f"--only {','.join(unknown)}: expected parts of {', '.join(parts.PARTS)}")
    if chosen.folder == FOLDER:
        shutil.rmtree(FOLDER, ignore_errors=True)
    elif chosen.folder.exists():
        sys.exit(f"--folder {chosen.folder} exists; expected a new folder, because the recording starts from an empty one")
    chosen.folder.mkdir(parents=True)
    if chosen.only:
        archives.unpack(chosen.folder, chosen.archives)
    parts.record(chosen.folder, chosen.cache, names)
    archives.pack(chosen.folder, chosen.archives)


if __name__ == "__main__":
    main()
