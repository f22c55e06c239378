#!/bin/bash
# Old against new tiles at wide head dims, about 100 s:
#
#     bash benchmarks/time_wide.sh PYTHON ROLLOUTS OUT_DIRECTORY
#
# A first pass over tiny forests, all processes at a time, fills Triton's cache; the second times.
# Shapes: rows,keys,warps,stages,registers,heads,pieces,shared,piece; piece 0, shared 0 is the old
# code. In a table the frozen candidate is the new code.
python=$1 rollouts=$2 out=$3
export PYTHONPATH=$PWD
mla="--dim 192 --value-dim 128"
old="128,64,8,3,0,0,1,0,0"
old_256="128,64,8,2,0,0,1,0,0"
short="prompt 256 x 1024 x 256"
# name : kernels : the rest
jobs=(
    "192:queries forward:--heads 16 16 $mla --shapes $old 128,64,8,3,0,0,1,2 64,64,4,2,0,0,1,1 128,128,8,2"
    "256:queries forward:--heads 16 4 --dim 256 --shapes $old_256 128,32,8,2,0,0,1,2"
    "192_keys:keys:--heads 16 16 $mla --shapes 32,128,8,3,0,0,1,0,0 32,128,8,2"
    "256_24:queries forward:--heads 24 4 --dim 256 --shapes $old_256"
    "192_128:queries forward:--heads 128 128 $mla --shapes $old"
)
mkdir -p "$out"
for job in "${jobs[@]}"; do
    IFS=: read -r name kernels rest <<<"$job"
    for kernel in $kernels; do
        # shellcheck disable=SC2086
        $python -m benchmarks tune --kernels $kernel $rest --scale 0.01 --workloads "$short" \
            >"$out/warm_${name}_$kernel.txt" 2>&1 &
    done
done
wait
date
for job in "${jobs[@]}"; do
    IFS=: read -r name kernels rest <<<"$job"
    set --
    [ "$name" = 192_128 ] && set -- --workloads "caterpillar 24" "$short"
    # shellcheck disable=SC2086
    $python -m benchmarks tune --kernels $kernels $rest "$@" --rollouts "$rollouts" \
        --out "$out/wide_$name.json" || echo "$name failed"
    date
done
