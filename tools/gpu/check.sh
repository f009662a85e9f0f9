#!/usr/bin/env bash
# All checks that need a GPU, with the programs that `tools/gpu/build.sh` has built. Run this script
# at the root of this repository:
#
#     tools/gpu/check.sh FOLDER [tests|drills|kernels|products|sanitizer|seven|share|ranks|soak|bench ...]
#                                                              # default: all except share, ranks and soak
#
# tests      every GPU test that takes less than a minute
# drills     memory taken and freed by another process, GPUs with too little memory; Qwen2.5-VL-7B's
#            shape on a whole GPU (4 minutes)
# kernels    each kernel against torch in f64, and its times (does not need the programs in FOLDER)
# sanitizer  the kernels' tests under compute-sanitizer, except the one that measures times
# seven      Bursar against transformers, random weights of 7B's shape (16.6 GB in SCRATCH, or /tmp)
# products   matrix products with few and with many rows, checked and timed next to cuBLASLt (`tools/gpu/{products,gated}.py`)
# share      models of 7B's shape that sleep in turns and lend memory, and chats whose history exceeds the GPU
#            (`turns.py`)
# ranks      all-reduce, checked and timed (`ranks.py`). `tests` has 2-GPU tests, skipped on one GPU
# soak       chats while actors die, memory runs short and models sleep, for BURSAR_SOAK_SECONDS (300); needs the GPU exclusively
# bench      `bursar bench` with 7B's shape
#
# BURSAR_CUDA_LIB names the folder of cuBLASLt if it is not in a standard folder. The last lines
# list the checks that ran and whether they passed. The script fails if a check failed.
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

# Without a GPU, the tests skip and count as passed. This script fails instead.
nvidia-smi -L || {
    echo "no GPU is here: nothing would be tested"
    exit 1
}

# Tests read golden files from this folder. They read other repository files at the path that
# the repository had when the tests were built.
export BURSAR_GOLDEN="$bin/golden"
python3 tests/golden/make.py --unpack "$BURSAR_GOLDEN"
for demo in "demo checkpoint" "hybrid_demo hybrid_checkpoint"; do
    read -r name checkpoint <<<"$demo"
    cp -r "model/demo/$checkpoint" "$BURSAR_GOLDEN/$name"
    rm -f "$BURSAR_GOLDEN/$name/model.safetensors"
    xz -d "$BURSAR_GOLDEN/$name/model.safetensors.xz"
done
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
            [[ $test == *-released_shape || $test == *-soak ]] && continue
            # Runs each module in a separate process. CUDA libraries keep memory until the process
            # ends, which would change later measurements.
            list=$("$test" --list | grep ': test$') || list=""
            [[ $list ]] || check "$(basename "$test") lists its tests" false
            mapfile -t modules < <([[ ! $list ]] || sed -E 's/^([a-z0-9_]+::)?.*/\1/' <<<"$list" | sort -u)
            for module in "${modules[@]}"; do
                [[ $module == drills:: ]] || check "$(basename "$test") $module" "$test" --test-threads=1 --nocapture "$module"
            done
        done
        ;;
    drills)
        check "drills on a whole card" "$bin/test-actors-cuda" --test-threads=1 --nocapture drills::
        ;;
    kernels)
        check "the kernels" python3 tools/gpu/kernels.py
        ;;
    sanitizer)
        check "the kernels under compute-sanitizer" compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$bin/test-kernels-cuda" --test-threads=1 --skip a_captured_step operations::
        BURSAR_RANKS_PATIENCE=60 BURSAR_RANKS_MOST=3 check "sums of ranks under compute-sanitizer" compute-sanitizer --tool memcheck --error-exitcode 1 \
            "$bin/test-kernels-cuda" --test-threads=1 ranks::a_sum_is
        ;;
    seven)
        checkpoint=$scratch/bursar-seven-billion
        [[ -e $checkpoint/prompts/long_text.json ]] ||
            check "transformers on 7B's shape" python3 tools/gpu/released_shape.py "$checkpoint"
        BURSAR_RELEASED_SHAPE=$checkpoint check "7B's shape" "$bin/test-model-released_shape" --nocapture
        ;;
    share)
        checkpoint=$scratch/bursar-seven-billion
        [[ -e $checkpoint/config.json ]] ||
            check "a checkpoint of 7B's shape" python3 tools/gpu/released_shape.py "$checkpoint" --weights-only
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
        echo "unknown part $part; expected one of tests, drills, kernels, products, sanitizer, seven, share, ranks, soak, bench"
        exit 2
        ;;
    esac
done
printf '%s\n' "=== summary" "${summary[@]}"
exit $failed
