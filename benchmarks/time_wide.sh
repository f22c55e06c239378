#!/bin/bash
# Old against new tiles at wide head dims:
#
#     bash benchmarks/time_wide.sh PYTHON ROLLOUTS OUT_DIRECTORY
#
# A first pass over tiny forests, all processes at a time, fills Triton's cache; the second times.
# Shapes: rows,keys,warps,stages,registers,heads,pieces,shared,width; width 256 is the old code.
python=$1 rollouts=$2 out=$3
export PYTHONPATH=$PWD
old_192="128,64,8,3,0,0,1,0,256"
jobs=(
    "192_queries --kernels queries --heads 16 16 --dim 192 --value-dim 128 --shapes $old_192 128,64,8,3,0,0,1,2"
    "192_forward --kernels forward --heads 16 16 --dim 192 --value-dim 128 --shapes $old_192 128,64,8,3,0,0,1,1"
    "192_keys --kernels keys --heads 16 16 --dim 192 --value-dim 128 --shapes 32,128,8,3,0,0,1,0,256 32,128,8,2"
    "256_queries --kernels queries --heads 16 4 --dim 256 --shapes 128,64,8,2,0,0,1,0 128,32,8,2,0,0,1,2,128"
    "256_forward --kernels forward --heads 16 4 --dim 256 --shapes 128,64,8,2,0,0,1,0"
    "256_24_queries --kernels queries --heads 24 4 --dim 256 --shapes 128,64,8,2,0,0,1,0"
    "256_24_forward --kernels forward --heads 24 4 --dim 256 --shapes 128,64,8,2,0,0,1,0"
    "192_128_queries --kernels queries --heads 128 128 --dim 192 --value-dim 128 --shapes $old_192"
    "192_128_forward --kernels forward --heads 128 128 --dim 192 --value-dim 128 --shapes $old_192"
)
mkdir -p "$out"
for job in "${jobs[@]}"; do
    # shellcheck disable=SC2086
    $python -m benchmarks tune ${job#* } --scale 0.01 --workloads "caterpillar 24" \
        >"$out/warm_${job%% *}.txt" 2>&1 &
done
wait
for job in "${jobs[@]}"; do
    case $job in
    192_128*) set -- --workloads "caterpillar 24" "prompt 256 x 1024 x 256" ;;
    *) set -- ;;
    esac
    # shellcheck disable=SC2086
    $python -m benchmarks tune ${job#* } "$@" --rollouts "$rollouts" \
        --out "$out/wide_${job%% *}.json" || echo "$job failed"
    date
done
