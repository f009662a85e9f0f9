#!/usr/bin/env bash
# Builds the programs that `tools/gpu/check.sh` runs on a GPU machine, which may have no cargo:
#
#     tools/gpu/build.sh [FOLDER] [tests|bench ...]        # default: .gpu/bin, and both
#
# FOLDER gets each test that uses a GPU and the release build of `bursar`, stripped and packed,
# because transfers to such a machine may be limited. It also gets the path of this repository at
# build time, because tests read golden files from there.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=${1:-.gpu/bin}
shift || true
parts=${*:-tests bench}
mkdir -p "$folder"
pwd >"$folder/built_at"

# Packs the programs in a folder into one archive. The programs have most of their bytes in common,
# so the dictionary spans all programs.
pack() { # FOLDER NAME
    tar c -C "$1" . | xz --lzma2=preset=1,dict=192MiB >"$folder/$2.tar.xz"
    echo "$folder/$2.tar.xz: $(stat -c %s "$folder/$2.tar.xz") bytes"
}

programs=$(mktemp -d)
trap 'rm -rf "$programs"' EXIT
mkdir "$programs/tests" "$programs/bench"

# The programs that cargo has just built, one per line: package, name, path.
executables() { python3 -c '
import json, sys
for message in map(json.loads, filter(lambda line: line.startswith("{"), sys.stdin)):
    if message.get("executable"):
        print(message["manifest_path"].split("/")[-2], message["target"]["name"], message["executable"])'; }

if [[ " $parts " == *" tests "* ]]; then
    # A test program is a file, or a folder with a `main.rs`.
    sources=(*/tests/*cuda*.rs */tests/cuda model/tests/released_shape.rs)
    # Built from the whole workspace like everything else, so that dependencies have the same
    # features and are built once.
    cargo test --workspace --no-run --message-format=json \
        $(basename -as .rs "${sources[@]}" soak | sort -u | sed 's/^/--test /') | executables >"$programs/built"
    for source in "${sources[@]}"; do
        package=${source%%/*} name=$(basename "$source" .rs)
        strip -o "$programs/tests/test-$package-$name" \
            "$(awk -v package="$package" -v name="$name" '$1 == package && $2 == name { print $3 }' "$programs/built")"
    done
    strip -o "$programs/tests/test-soak" "$(awk '$2 == "soak" { print $3 }' "$programs/built")"
    pack "$programs/tests" tests
fi
if [[ " $parts " == *" bench "* ]]; then
    cargo build --release --bin bursar --message-format=json | executables >"$programs/built"
    strip -o "$programs/bench/bursar" "$(awk '$2 == "bursar" { print $3 }' "$programs/built")"
    pack "$programs/bench" bench
fi
