#!/usr/bin/env bash
# Builds what `tools/gpu/check.sh` runs on a GPU machine, which may have no cargo:
#
#     tools/gpu/build.sh [FOLDER] [tests|bench ...]        # .gpu/bin, and both, if not told otherwise
#
# FOLDER gets each test that knows of a GPU and the release build of `bursar`, stripped and packed (what travels to such a
# machine may be limited), and where this repository was when they were built: tests read golden files from there.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.gpu/bin}
shift || true
parts=${*:-tests bench}
mkdir -p "$folder"
pwd >"$folder/built_at"

# The programs in a folder, as one archive: they have most of their bytes in common, so the dictionary spans them all.
pack() { # FOLDER NAME
    tar c -C "$1" . | xz --lzma2=preset=1,dict=192MiB >"$folder/$2.tar.xz"
    echo "$folder/$2.tar.xz: $(stat -c %s "$folder/$2.tar.xz") bytes"
}

programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
mkdir "$programs/tests" "$programs/bench"

# Where cargo put what it has just built: the only executable that it tells of.
executable() { python3 -c '
import json, sys
found = [json.loads(line).get("executable") for line in sys.stdin if line.startswith("{")]
print([path for path in found if path][-1])'; }

if [[ " $parts " == *" tests "* ]]; then
    for source in */tests/*cuda*.rs model/tests/seven_billion.rs; do
        package=bursar-${source%%/*} name=$(basename "$source" .rs)
        built=$(cargo test -p "$package" --test "$name" --no-run --message-format=json | executable)
        strip -o "$programs/tests/test-${source%%/*}-$name" "$built"
    done
    pack "$programs/tests" tests
fi
if [[ " $parts " == *" bench "* ]]; then
    strip -o "$programs/bench/bursar" "$(cargo build --release --bin bursar --message-format=json | executable)"
    pack "$programs/bench" bench
fi
