#!/usr/bin/env bash
# Everything that wants a GPU, from what `tools/gpu/build.sh` has built, run at the root of this repository:
#
#     tools/gpu/check.sh FOLDER [tests|drills|kernels|products|sanitizer|seven|share|ranks|soak|bench ...]
#                                                              # if not told otherwise, all but share, ranks and soak
#
# tests      every GPU test that is over in a minute
# drills     a neighbour that comes and goes, cards with too little: 7B's shape on a whole card (four minutes)
# kernels    each kernel alone against torch in f64, and its times (needs no FOLDER's binaries)
# sanitizer  the kernels' tests under compute-sanitizer, but for the one that takes the time
# seven      a random checkpoint of 7B's shape (16.6 GB below SCRATCH, /tmp if not set): transformers and we compute it
# products   products of few rows and of many, checked and timed beside cuBLASLt's (`tools/gpu/{products,gated}.py`)
# share      models of that shape that take turns and lend, and chats whose history does not fit the card (`turns.py`)
# ranks      sums over all GPUs, checked and timed (`ranks.py`); `tests` has the tests of two GPUs, which skip on one
# soak       chats through deaths, neighbours and sleep for BURSAR_SOAK_SECONDS (300); it wants the GPU to itself
# bench      `bursar bench` on that shape
#
# BURSAR_CUDA_LIB names the folder of cuBLASLt, if it is at no usual place. What was run and whether it passed stands in
# the last lines; it fails when anything did.
set -uo pipefail
folder=$(cd "$1" && pwd)
shift
parts=${*:-tests drills kernels products sanitizer seven bench}
root=$(pwd)
scratch=${SCRATCH:-/tmp}
bin=$(mktemp -d)
trap 'rm -rf "$bin"' EXIT
for packed in "$folder"/*.tar.xz; do
    tar xJf "$packed" -C "$bin"
done

# Tests of a machine without a GPU skip and pass, which is not what anybody comes here for.
nvidia-smi -L || {
    echo "no GPU is here: nothing would be tested"
    exit 1
}

# Tests read golden files from this folder, and others of the repository from where it was when they were built.
export BURSAR_GOLDEN="$bin/golden"
python3 tests/golden/make.py --unpack "$BURSAR_GOLDEN"
cp -r model/demo/checkpoint "$BURSAR_GOLDEN/demo"
rm -f "$BURSAR_GOLDEN/demo/model.safetensors"
xz -d "$BURSAR_GOLDEN/demo/model.safetensors.xz"
built_at=$(cat "$folder/built_at")
if [[ ! -e $built_at ]]; then
    mkdir -p "$(dirname "$built_at")"
    ln -s "$root" "$built_at"
fi

summary=()
failed=0
check() { # NAME COMMAND...
    echo "=== $1"
    local started=$SECONDS
    if "${@:2}"; then summary+=("passed  $1, $((SECONDS - started)) s"); else
        summary+=("FAILED  $1, $((SECONDS - started)) s")
        failed=1
    fi
}

for part in $parts; do
    case $part in
    tests)
        for test in "$bin"/test-*; do
            [[ $test == *-seven_billion || $test == *-cuda_drills || $test == *-soak ]] || check "$(basename "$test")" "$test" --test-threads=1 --nocapture
        done
        ;;
    drills)
        check "drills on a whole card" "$bin/test-actors-cuda_drills" --test-threads=1 --nocapture
        ;;
    kernels)
        check "the kernels alone" python3 tools/gpu/kernels.py
        ;;
    sanitizer)
        check "the kernels under compute-sanitizer" compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$bin/test-kernels-cuda" --test-threads=1 --skip a_captured_step
        BURSAR_RANKS_PATIENCE=60 BURSAR_RANKS_MOST=3 check "sums of ranks under compute-sanitizer" compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$bin/test-kernels-cuda_ranks" --test-threads=1 a_sum_is
        ;;
    seven)
        checkpoint=$scratch/bursar-seven-billion
        [[ -e $checkpoint/prompts/long_text.json ]] ||
            check "transformers on 7B's shape" python3 tools/gpu/seven_billion.py "$checkpoint"
        BURSAR_SEVEN_BILLION=$checkpoint check "7B's shape" "$bin/test-model-seven_billion" --nocapture
        ;;
    share)
        checkpoint=$scratch/bursar-seven-billion
        [[ -e $checkpoint/config.json ]] ||
            check "a checkpoint of 7B's shape" python3 tools/gpu/seven_billion.py "$checkpoint" --weights-only
        export BURSAR=$bin/bursar
        check "models that take turns" python3 tools/gpu/turns.py turns "$checkpoint" --cycles 1 \
            --knob host-bytes=60GiB --knob memory-fraction=0.45
        check "models that lend" python3 tools/gpu/turns.py lending "$checkpoint"
        check "chats on the host" python3 tools/gpu/turns.py chats "$checkpoint" \
            --knob kv-tokens=293000 --knob swap-space=36 --knob host-bytes=40GiB
        ;;
    ranks)
        check "sums over all GPUs" python3 tools/gpu/ranks.py
        ;;
    soak)
        check "a soak" "$bin/test-soak" --ignored --nocapture gpu
        ;;
    products)
        check "products of few rows" python3 tools/gpu/products.py
        check "products of many rows" python3 tools/gpu/gated.py
        ;;
    bench)
        check "the bench" "$bin/bursar" bench --shape qwen2.5-vl-7b --random
        ;;
    *)
        echo "$part is none of tests, drills, kernels, products, sanitizer, seven, share, ranks, soak and bench"
        exit 2
        ;;
    esac
done
printf '%s\n' "=== in all" "${summary[@]}"
exit $failed
