#!/usr/bin/env bash
# Builds what `tools/gpu/check.sh` runs on a GPU machine, which may have no cargo:
#
#     tools/gpu/build.sh [FOLDER] [tests|bench ...]        # .gpu/bin, and both, if not told otherwise
#
# FOLDER gets each test that knows of a GPU and the release build of `bursar`, stripped and packed (gzip, since what
# travels to such a machine may be limited), and where this repository was when they were built: tests read golden files
# from there.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.gpu/bin}
shift || true
parts=${*:-tests bench}
mkdir -p "$folder"
pwd >"$folder/built_at"

pack() { # FILE NAME
    strip -o "$folder/$2.bin" "$1"
    gzip -6 -c "$folder/$2.bin" >"$folder/$2.gz"
    rm "$folder/$2.bin"
    echo "$folder/$2.gz: $(stat -c %s "$folder/$2.gz") bytes"
}

# Where cargo put what it has just built: the only executable that it tells of.
executable() { python3 -c '
import json, sys
found = [json.loads(line).get("executable") for line in sys.stdin if line.startswith("{")]
print([path for path in found if path][-1])'; }

if [[ " $parts " == *" tests "* ]]; then
    rm -f "$folder"/test-*.gz
    for source in */tests/*cuda*.rs model/tests/seven_billion.rs; do
        package=bursar-${source%%/*} name=$(basename "$source" .rs)
        built=$(cargo test -p "$package" --test "$name" --no-run --message-format=json | executable)
        pack "$built" "test-${source%%/*}-$name"
    done
fi
if [[ " $parts " == *" bench "* ]]; then
    pack "$(cargo build --release --bin bursar --message-format=json | executable)" bursar
fi
