#!/usr/bin/env bash
# Tests and benchmarks on a GPU, step by step. Every step has a time limit, a log and JSON files, and
# one that fails does not stop the next; the last lines say which failed, and the exit code is 1 then.
#
#   bash tools/gpu_check.sh STEP...
#
# On a machine with a network, install the project first: pip install --group dev -e '.[fa4,plot]'.
# For a machine without one, gather here what its steps need, and carry .gpu there with the checkout:
#
#   bash tools/gpu_pack.sh             says what there is
#
# Steps, with the minutes they took on one H200, in an order that compiles once:
#
#   tests        3.5   the GPU tests of both backends, of the head, and the interpreter's cases on the GPU
#   compile      ?     compiled layers of the most used families against eager ones
#   chosen       ?     attention to chosen keys, an indexer's scores and selection: tests and times; then gathered
#   gathered     3     gathered latents beside tiles of all keys on chains; GATHERED_ARGS="--model glm-5"
#   backends     4.5   triton and flash on every workload, flash-attn-4 by hand, host time
#   peers        4     every workload against replication and FlexAttention; the dense ceilings
#   depth        3     attention by depth of the forest
#   layer        9     one decoder layer; in two runs with LAYER_ARGS="--prompts ..."
#   model        4     a policy update, of 8 or 4 layers; 9 with MODEL_ARGS="--layers 12 --cases ..."
#   memory       2-4   the peak of a micro-batch
#   update_best  ?     a policy update of 12 layers of an 8B model, every side with its defaults and at its best
#   update_36    3     the same two settings with 36 layers, packed alone; update_long, a prompt of 8K with 32 responses
#   experts      2.5   a policy update of Qwen3-30B-A3B's shape and where its time goes; experts_peers, through
#                      flash-attn-4 and FA2; experts_best, packed with compiled layers. EXPERTS_ARGS="--layers 24"
#   low          ?     a policy update of 8 layers of an 8B model in bf16, float8, with adapters over bf16 and over 4
#                      bits, packed and through FA2; low_compiled, bf16 and float8 in compiled layers. LOW_ARGS
#   settings     ?     the update with AdamW of Qwen3-0.6B and of 12 layers of Qwen3-8B, with defaults and at its best
#   settings_2gpu 5    the same under FSDP2, on two
#   update       2.5   a policy update with AdamW, on one GPU
#   update_2gpu  2     the same under FSDP2, on two
#   verl         4     a PPO update under verl, of Qwen3-0.6B's shape (verl_8b: of an 8B model's layers)
#   verl_2gpu    3.5   the same on two (verl_8b_2gpu)
#   verl_pictures ?    updates with pictures under verl beside each sequence alone: errors
#   run          ?     whole GRPO steps in TRL, its trainer and ours, prompts of 2K; run_256 and run_8k; run_turns,
#                      an environment that replies; run_curves, the rewards of 20 steps; run_2gpu, under FSDP2 on two
#   offloading   ?     TRL's activation offloading with its streams, ours beside the stock trainer
#   learn        ?     a pretrained model learns a task by GRPO in TRL, every side; its weights take two calls (gpu_pack.sh
#                      real). LEARN=coins LEARN_ARGS="--task coins --sides trl prefixtree"
#   first_step   ?     from a process's start to its first optimizer step, caches of compilers empty and full;
#                      FIRST_STEP_ARGS="--models qwen3-0.6b"; first_step_trl 6, under TRL, its trainer and ours
#   parallel     2.5   one forest on all GPUs of the machine; PARALLEL_ARGS="--fsdp" shards the weights;
#                      parallel_hybrids 5, of Qwen3.5-9B's layers
#   steps        3     a tree larger than one forward, on one GPU
#   megatron     3     the adapter for Megatron-Core on two GPUs: errors and times; MEGATRON_ARGS="context
#                      context_times"; megatron_4gpu, context parallelism on four
#   decode       1     a decoding step over a forest; DECODE_ARGS="--prompts 8192 --programs 8 --profile" to try things
#   sampling     1     the sampler's tests: captured steps, memory, families
#   decode_steps 1     a whole decoding step, over the time of its bytes
#   decode_peers ?     TreeSampler and transformers' generate, end to end; DECODE_PEERS_ARGS="--prompt 256" for other lengths
#   decode_tries ?     compiled steps with options of inductor, and their kernels
#   histories    3     TreeSampler from all histories of the rollouts, and with a row an item; HISTORIES_ARGS
#   head         1     the language model's head
#   distill      1     KL to a teacher beside it, and by TRL's and Liger's kernels; distill_models, the update with
#                      four layers of student and teacher
#   pictures     ?     an update of a browser agent's turns: screenshots encoded once, and anew for every sample
#   recurrence   4     recurrent layers beside fla-core's kernels; recurrence_qla 5, beside flash-qla's
#   liger        1     Liger Kernel's layers in the families it serves
#   pack_gqa     5     flash's forward with the heads of a group in a tile, and apart
#   shapes       13    triton and flash with the heads of models: shapes_a, shapes_b and shapes_c in turn
#   attention    5     the Triton kernels alone
#   tune         9     which configuration of each Triton kernel is fastest
#   wide         2     dQ and the forward at head dims 192 and 256, the tiles of now beside those before
#   sanitize     3-9   memory and barriers under compute-sanitizer, which needs a GPU that is not sandboxed
#   peers_a, peers_b   5 each; another project's peers.py on the same workloads, for compare_peers
#
# What compilers keep on disk (tilelang needs a minute and more per kernel and number of heads) goes to
# UNPACKED/prefixtree-caches. With CACHES=1 it comes back as OUT/caches.tar.xz; put into .gpu, it is there
# on the next machine of the same kind.
#
# With BRING=FILE everything in OUT is in one archive as well, anew every 12 seconds: for a machine that
# gives few files back, and those of a command that it ends.
#
# Results go to the folder OUT (default: .gpu/out). Show them again, where matplotlib is draw them:
#
#   python -m benchmarks show depth depth.json
#   python -m benchmarks depth --read depth.json --plot depth.png    (layer, model, memory, peers, update too)
#   python -m benchmarks compare_peers --ours attention.json --peers peers_*.json
#
# Variables. BACKEND: of the benchmarks (default: auto). ROLLOUTS: a JSONL.gz file of yours. OUT,
# GPU_FILES (.gpu) and UNPACKED (/tmp, where archives are unpacked once): folders.
# PYTEST_ARGS, ATTENTION_ARGS, TUNE_ARGS, DEPTH_ARGS, PEERS_ARGS, LAYER_ARGS, MODEL_ARGS, MEMORY_ARGS,
# UPDATE_ARGS, UPDATE_BEST_ARGS, LOW_ARGS, DISTILL_ARGS, EXPERTS_ARGS, SETTINGS_ARGS, PARALLEL_ARGS, STEPS_ARGS, VERL_ARGS, RUN_ARGS, LEARN_ARGS, FIRST_STEP_ARGS, RECURRENCE_ARGS,
# HEAD_ARGS, PICTURES_ARGS, PACK_GQA_ARGS, SHAPES_ARGS, DECODE_ARGS, DECODE_PEERS_ARGS, HISTORIES_ARGS: added to the command of a step.
set -uo pipefail
cd "$(dirname "$0")/.."
files=${GPU_FILES:-.gpu}
out=${OUT:-$files/out}
# QuACK fingerprints functions whose path has no site-packages, and stops at what it cannot
fa4=${UNPACKED:-/tmp}/prefixtree-fa4/site-packages
fla=${UNPACKED:-/tmp}/prefixtree-fla
packages=${UNPACKED:-/tmp}/prefixtree-packages
verl=${UNPACKED:-/tmp}/prefixtree-verl
trl=${UNPACKED:-/tmp}/prefixtree-trl
low=${UNPACKED:-/tmp}/prefixtree-low
real=${UNPACKED:-/tmp}/prefixtree-real
megatron=${UNPACKED:-/tmp}/prefixtree-megatron
caches=${UNPACKED:-/tmp}/prefixtree-caches
outer=${PYTHONPATH:+:$PYTHONPATH}
rollouts=${ROLLOUTS:-$files/data/airline_rollouts.jsonl.gz}
# without the file, workloads that read it are skipped
read_rollouts=()
[[ ! -f $rollouts ]] || read_rollouts=(--rollouts "$rollouts")
export TRITON_CACHE_DIR=$caches/triton TILELANG_CACHE_DIR=$caches/tilelang TORCHINDUCTOR_CACHE_DIR=$caches/inductor
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
failed=()

# limited NAME SECONDS COMMAND...: its output to a log as well, its failure noted
limited() {
  local name=$1 limit=$2 start=$SECONDS rc
  shift 2
  echo "== $name (at most $limit s): $*"
  timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  rc=$?
  echo "== $name: exit $rc after $((SECONDS - start)) s"
  ((rc == 0)) || failed+=("$name ($rc)")
}

# unpack ARCHIVE FOLDER: once per machine
unpack() {
  if [[ -f $1 && ! -f $2/.unpacked ]]; then
    mkdir -p "$2" && tar xJf "$1" -C "$2" && touch "$2/.unpacked"
  fi
  [[ -f $2/.unpacked ]]
}

# our own code and, where they are packed, flash-attn-4 and fla-core: behind ours, their archives have packages of their
# own. Of apache-tvm-ffi, which both bring, flash-qla needs the older one, and flash-attn-4 takes it
ours() {
  export PYTHONPATH=$PWD$outer
  ! unpack "$files/fla.tar.xz" "$fla" ||
    export PYTHONPATH=$PYTHONPATH:$fla CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} PATH=$PATH:/usr/local/cuda/bin
  ! unpack "$files/fa4.tar.xz" "$fa4" || PYTHONPATH=$PYTHONPATH:$fa4:$fa4/nvidia_cutlass_dsl/dsl_packages
  ! unpack "$files/packages.tar.xz" "$packages" || PYTHONPATH=$PYTHONPATH:$packages
  python3 -c 'from importlib.metadata import version as v
print(*[f"{n} {v(n)}" for n in ("torch", "numpy", "numba", "llvmlite", "pytest", "hypothesis", "rich", "networkx")])' ||
    { failed+=("$1 (packages)"); return 1; }
}

# a test marked gpu skips where there is none, which is no result
cuda() {
  python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { failed+=("$1 (no CUDA device)"); return 1; }
}

# tested NAME SECONDS ARGUMENT...: pytest with those files and options
tested() {
  local name=$1 limit=$2
  shift 2
  # exit code 5, nothing selected, is a failure too
  limited "$name" "$limit" env OMP_NUM_THREADS=1 python3 -m pytest -q -n 12 -p no:benchmark -p no:cacheprovider \
    "$@" ${PYTEST_ARGS:-}
}

tests() {
  ours tests && cuda tests || return
  tested tests_gpu 420 tests/kernels/attention/test_on_gpu.py tests/kernels/attention/flash/test_on_gpu.py \
    tests/kernels/attention/flash/test_tilings_on_gpu.py \
    tests/kernels/attention/triton/test_small_tiles.py tests/kernels/lm_head/test_logprobs.py \
    tests/kernels/lm_head/test_extremes.py tests/kernels/lm_head/test_divergence.py tests/packing/test_transfers.py \
    tests/kernels/decoding/test_on_gpu.py tests/kernels/decoding/test_kernels.py tests/kernels/decoding/test_draw.py
  # the suite ran on another torch in CI: the parts nearest to torch, on this one, on the CPU
  PYTEST_ARGS='' tested tests_torch 150 -m "not gpu" tests/kernels/attention/test_attention.py tests/kernels/attention/test_operator.py \
    tests/kernels/decoding/test_cascade.py tests/kernels/attention/test_torch_compile.py tests/integrations/test_dualkv.py
}

# through inductor, which compiles each family anew
compile() {
  ours compile && cuda compile || return
  tested compile 500 -m gpu tests/models/test_compiled.py
}

chosen() {
  ours chosen && cuda chosen || return
  tested chosen 400 tests/kernels/attention/triton/test_chosen.py tests/kernels/test_index_scores.py \
    tests/kernels/test_best_keys.py tests/kernels/attention/triton/test_chosen_on_gpu.py
  limited sparse 190 python3 -m benchmarks sparse --replicated 65536 "${read_rollouts[@]}" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/sparse.json"
  gathered
}

# gathered latents beside tiles of all keys, on chains; GATHERED_ARGS="--model glm-5"
gathered() {
  ours gathered && cuda gathered || return
  tested gathered_tests 200 tests/kernels/latents/test_kernels.py
  # shellcheck disable=SC2086
  limited gathered 150 python3 -m benchmarks sparse --chains 32768 131072 --repeats 3 ${GATHERED_ARGS:-} \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/gathered.json"
}

liger() {
  ours liger && cuda liger || return
  # its experts' kernels are tuned over dozens of compilations each, which change no result
  PYTEST_ARGS='' LIGER_FUSED_MOE_AUTOTUNE=0 tested liger 400 tests/models/test_liger.py
}

# shared_peers NAME SECONDS SELECTION PEER...: the shared peers.py on the workloads that a slice of NAMES selects
shared_peers() {
  local name=$1 limit=$2 selection=$3 workloads
  shift 3
  if unpack "$files/fa4.tar.xz" "$fa4"; then
    unpack "$files/packages.tar.xz" "$packages" || failed+=("$name (no $files/packages.tar.xz)")
    export PYTHONPATH=$fa4:$fa4/nvidia_cutlass_dsl/dsl_packages:$packages$outer
  else
    export PYTHONPATH=${outer#:}
    failed+=("$name (no flash-attn-4: no $files/fa4.tar.xz)")
  fi
  ROLLOUTS=$(realpath -m "$rollouts")
  export ROLLOUTS
  mapfile -t workloads < <(cd "$files/bench" && python3 -c "from workloads import NAMES
print(*$selection, sep='\n')")
  limited "$name" "$limit" python3 "$files/bench/peers.py" --workloads "${workloads[@]}" --peers "$@" \
    --out "$out/$name.json"
}

# two halves: peers.py writes its file at the end, and a command cut at 600 s would leave nothing
peers_a() { shared_peers peers_a 580 'NAMES[:5]' prototype flex fa4tree; }

peers_b() {
  # where nothing is shared the replicated batch is the same
  shared_peers peers_documents 100 '[n for n in NAMES if n.startswith("documents")]' fa2 fa4
  shared_peers peers_b 480 'NAMES[5:]' prototype flex fa4tree
}

attention() {
  ours attention || return
  limited attention 540 python3 -m benchmarks attention --backend ${BACKEND:-triton} "${read_rollouts[@]}" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/attention.json" ${ATTENTION_ARGS:-}
}

backends() {
  ours backends || return
  local about=("${read_rollouts[@]}" --commit "$(cat "$files/commit" 2>/dev/null)")
  limited backends 300 python3 -m benchmarks attention --backend triton flash "${about[@]}" --out "$out/backends.json"
  limited flash_by_hand 180 python3 -m benchmarks flash_by_hand "${about[@]}" --out "$out/flash_by_hand.json"
  limited host 60 python3 -m benchmarks host --out "$out/host.json"
}

# flash-attn-4 keeps what it compiles on disk if told to; Triton does so by itself
keep=(env FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR="$caches/cute")

# compiled_first NAME SECONDS COMMAND...: the command once a line of arguments on stdin, several at a time, so that the
# run that is timed finds its kernels on disk
compiled_first() {
  local name=$1 limit=$2 start=$SECONDS
  shift 2
  # one that fails costs the time to compile later, and fails there
  OMP_NUM_THREADS=1 timeout --kill-after=10 "$limit" xargs -P "${PROCESSES:-12}" -L 1 "$@" --only-compile \
    >"$out/$name.compiled.log" 2>&1 || echo "not everything was compiled: see $name.compiled.log"
  echo "== $name: compiled in $((SECONDS - start)) s"
}

# flash-attn-4's forward with the heads of a group packed in a tile and apart, every head dim and group
pack_gqa() {
  ours pack_gqa || return
  local run=("${keep[@]}" python3 -m benchmarks pack_gqa "${read_rollouts[@]}")
  for dim in 256 192 128 64 96; do
    printf -- "--dims $dim --groups %s\n" 6 3 5 7 4 2 8
  done | compiled_first pack_gqa 100 "${run[@]}" --tasks 1 ${PACK_GQA_ARGS:-}
  limited pack_gqa 200 "${run[@]}" --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/pack_gqa.json" ${PACK_GQA_ARGS:-}
}

# head_shapes NAME SHAPE...: triton and flash with the heads of models
head_shapes() {
  local name=$1
  shift
  ours "$name" || return
  local run=("${keep[@]}" python3 -m benchmarks attention --backend ${BACKEND:-triton flash} "${read_rollouts[@]}")
  # forests of long and of short nodes, for which triton has other kernels
  printf -- '--shapes %s\n' "$@" |
    compiled_first "$name" 130 "${run[@]}" --tasks 1 --workloads "airline per turn" "prompt 512 x 64 x 1K" ${SHAPES_ARGS:-}
  limited "$name" 420 "${run[@]}" --tasks 3 --shapes "$@" --commit "$(cat "$files/commit" 2>/dev/null)" \
    --out "$out/$name.json" ${SHAPES_ARGS:-}
}

shapes_a() {
  head_shapes shapes_a qwen3.5-27b phi-3-mini qwen3-8b qwen3-30b-a3b qwen3-235b-a22b qwen3-32b qwen3-1.7b santacoder \
    llama-2-7b
}

shapes_b() {
  head_shapes shapes_b deepseek-v2-lite gemma-7b qwen1.5-0.5b 16-16-192 gpt-oss-20b llama-3.2-1b 32-8-96 16-8-192 \
    qwen3-next-80b-a3b qwen3.5-9b gemma-2-9b
}

# groups that do not divide a tile's rows, and few heads
shapes_c() {
  head_shapes shapes_c qwen2.5-7b qwen3-14b llama-3.2-3b qwen2.5-1.5b qwen2.5-0.5b smollm2-135m qwen3-8b-1of4 \
    qwen3-8b-1of8 qwen3.5-27b-1of2 qwen3.5-27b-1of4
}

shapes() { shapes_a; shapes_b; shapes_c; }

tune() {
  ours tune || return
  limited tune 570 python3 -m benchmarks tune "${read_rollouts[@]}" --out "$out/tune.json" ${TUNE_ARGS:-}
}

# candidates: rows,keys,warps,stages,registers,heads,pieces,shared,piece; piece 0 and shared 0 are q and the
# gradient of out in registers, 192 padded to 256. In a table the frozen candidate is the code of now
wide() {
  ours wide || return
  local line name kernel kernels arguments about old=128,64,8,3,0,0,1,0,0 old_256=128,64,8,2,0,0,1,0,0 short="prompt 256 x 1024 x 256"
  local mla="--dim 192 --value-dim 128" run=(python3 -m benchmarks tune)
  local lines=(
    "192 queries,forward --heads 16 16 $mla --shapes $old 128,64,8,3,0,0,1,2 64,64,4,2,0,0,1,1"
    "192_keys keys --heads 16 16 $mla --shapes 32,128,8,3,0,0,1,0,0 32,128,8,2"
    "256 queries,forward --heads 16 4 --dim 256 --shapes $old_256 128,32,8,2,0,0,1,2"
    "256_24 queries,forward --heads 24 4 --dim 256 --shapes $old_256"
    "192_128 queries,forward --heads 128 128 $mla --shapes $old"
  )
  # tiny forests fill Triton's cache, several kernels at a time
  for line in "${lines[@]}"; do
    read -r name kernels arguments <<<"$line"
    for kernel in ${kernels//,/ }; do printf '%s\n' "--kernels $kernel $arguments"; done
  done | OMP_NUM_THREADS=1 timeout 100 xargs -P 12 -L 1 "${run[@]}" --scale 0.01 --workloads "$short" >"$out/wide.compiled.log" 2>&1
  for line in "${lines[@]}"; do
    read -r name kernels arguments <<<"$line"
    about=("${read_rollouts[@]}")
    # torch's comparison of 128 heads leaves no room for the larger workloads
    [[ $name != 192_128 ]] || about+=(--workloads "caterpillar 24")
    limited "wide_$name" 90 "${run[@]}" --kernels ${kernels//,/ } $arguments "${about[@]}" --out "$out/wide_$name.json"
  done
}

# benchmark NAME SECONDS ARGUMENT...: one whose rows are those of benchmarks/lib/runs.py
benchmark() {
  local name=$1 limit=$2
  shift 2
  ours "$name" || return
  limited "$name" "$limit" python3 -m benchmarks "$name" --backend "${BACKEND:-auto}" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json" "$@"
}

depth() { benchmark depth 560 ${DEPTH_ARGS:-}; }

peers() { benchmark peers 575 "${read_rollouts[@]}" ${PEERS_ARGS:-}; }

layer() { benchmark layer 575 ${LAYER_ARGS:-}; }

model() {
  benchmark model 575 --layers 8 4 --repeats 2 "${read_rollouts[@]}" --profile "$out/profile.txt" ${MODEL_ARGS:-}
}

# every side with its defaults, then in its best setting: compiled layers, as little recomputed as fits
update_best() {
  ours update_best || return
  local run=("${keep[@]}" python3 -m benchmarks model --layers 12 --repeats 1 --cases airline apart
    --sides packed fa4 fa2 --backend "${BACKEND:-auto}" --commit "$(cat "$files/commit" 2>/dev/null)"
    "${read_rollouts[@]}" ${UPDATE_BEST_ARGS:-})
  limited update_best 330 "${run[@]}" --layers-by compile --recompute auto --out "$out/update_best.json"
  limited update_default 250 "${run[@]}" --recompute all --out "$out/update_default.json"
  python3 -m benchmarks show model --table best "$out/update_default.json" "$out/update_best.json"
}

# both_settings NAME ARGUMENT...: packed alone, at its best and with defaults
both_settings() {
  local name=$1
  shift
  ours "$name" || return
  local run=("${keep[@]}" python3 -m benchmarks model --repeats 2 --sides packed --backend "${BACKEND:-auto}"
    --commit "$(cat "$files/commit" 2>/dev/null)" "${read_rollouts[@]}" "$@" ${UPDATE_BEST_ARGS:-})
  limited "${name}_best" 280 "${run[@]}" --layers-by compile --recompute auto --out "$out/${name}_best.json"
  limited "${name}_default" 280 "${run[@]}" --recompute all --out "$out/${name}_default.json"
  python3 -m benchmarks show model --table best "$out/${name}_default.json" "$out/${name}_best.json"
}

update_36() { both_settings update_36 --layers 36 --cases airline; }

update_long() { both_settings update_long --layers 12 --cases longreason --micro-batches 32; }

# in_low_precision NAME SECONDS PRECISION...: the packed update and FA2's in each, then all in one table
in_low_precision() {
  local name=$1 limit=$2 precision results=()
  shift 2
  ours "$name" || return
  unpack "$files/low.tar.xz" "$low" || { failed+=("$name (no $files/low.tar.xz)"); return 1; }
  # behind ours and what the machine has
  PYTHONPATH=$PYTHONPATH:$low
  for precision in "$@"; do
    results+=("$out/${name}_$precision.json")
    limited "${name}_$precision" "$limit" python3 -m benchmarks model --layers 8 --repeats 1 --cases airline \
      --sides packed fa2 --precision "$precision" --backend "${BACKEND:-auto}" "${by[@]}" \
      --commit "$(cat "$files/commit" 2>/dev/null)" "${read_rollouts[@]}" --out "${results[-1]}" ${LOW_ARGS:-}
  done
  python3 -m benchmarks show model --table low_precision "${results[@]}"
}

low() { local by=(); in_low_precision low 148 plain float8 lora qlora; }

low_compiled() { local by=(--layers-by compile); in_low_precision low_compiled 295 plain float8; }

# with_experts NAME SECONDS ARGUMENT...: all 48 layers, or as many of the next numbers as the replicated side has memory for
with_experts() {
  local name=$1 limit=$2
  shift 2
  ours "$name" || return
  limited "$name" "$limit" "${keep[@]}" python3 -m benchmarks model --shape qwen3-30b-a3b --layers 48 40 32 24 --cases airline \
    --repeats 1 --backend "${BACKEND:-auto}" --commit "$(cat "$files/commit" 2>/dev/null)" "${read_rollouts[@]}" \
    --profile "$out/$name.txt" --out "$out/$name.json" "$@" ${EXPERTS_ARGS:-}
}

experts() { with_experts experts 400 --sides packed own; }

experts_peers() { with_experts experts_peers 590 --sides packed fa4 fa2; }

experts_best() { with_experts experts_best 300 --sides packed --layers-by compile --recompute auto; }

# settings_on GPUS: defaults, then compiled layers with as little recomputed as fits, of a small model and of a large one's layers
settings_on() {
  local name=settings launch=() shape unit
  (($1 == 1)) || { name=settings_2gpu; launch=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$1"); }
  ours $name || return
  local run=("${keep[@]}" python3 "${launch[@]}" -m benchmarks update --backend "${BACKEND:-auto}" "${read_rollouts[@]}"
    --commit "$(cat "$files/commit" 2>/dev/null)" --sides packed)
  (($1 == 1)) || run+=(group --fsdp)
  for shape in "qwen3-0.6b --layers 28" "qwen3-8b --layers 12 --checked 4"; do
    # small layers are gathered seven at a time, and once
    unit=()
    (($1 == 1)) || [[ $shape != qwen3-0.6b* ]] || unit=(--fsdp-unit 7)
    # layers compiled, then as transformers has them
    limited "${name}_${shape%% *}_best" 150 "${run[@]}" --shape $shape --layers-by compile --recompute auto "${unit[@]}" \
      --out "$out/${name}_${shape%% *}_best.json" ${SETTINGS_ARGS:-}
    limited "${name}_${shape%% *}_default" 140 "${run[@]}" --shape $shape \
      --out "$out/${name}_${shape%% *}_default.json" ${SETTINGS_ARGS:-}
  done
}

settings() { settings_on 1; }

settings_2gpu() { settings_on 2; }

memory() { benchmark memory 560 ${MEMORY_ARGS:-}; }

decode() { benchmark decode 420 "${read_rollouts[@]}" ${DECODE_ARGS:-}; }

decode_steps() {
  ours decode_steps || return
  limited decode_steps 400 python3 -m benchmarks decode --level 1 --commit "$(cat "$files/commit" 2>/dev/null)" \
    --out "$out/decode_steps.json" ${DECODE_ARGS:-}
}

decode_peers() { benchmark decode_peers 590 ${DECODE_PEERS_ARGS:-}; }

# prompts of 256 tokens, 256 steps: what a whole step of TRL generates
decode_tries() {
  ours decode_tries || return
  tried decode_tries --sides tree-compiled --profile
  tried decode_tries_combo --sides tree-compiled --inductor combo_kernels=1
  [[ -z ${TRY_TUNED:-} ]] || tried decode_tries_tuned --sides tree-compiled --inductor max_autotune_gemm=1
}

tried() {
  local name=$1
  shift
  limited "$name" 200 python3 -m benchmarks decode_peers --new 256 --repeats 3 ${TRIES_ARGS:---prompt 256} "$@" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json"
}

histories() {
  ours histories || return
  limited histories 590 python3 -m benchmarks decode_peers "${read_rollouts[@]}" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/histories.json" ${HISTORIES_ARGS:-}
}

sampling() {
  ours sampling && cuda sampling || return
  # a test measures memory, and graphs of several processes would share the GPU
  limited sampling 400 env OMP_NUM_THREADS=1 python3 -m pytest -q -p no:benchmark -p no:cacheprovider \
    tests/sampling/test_on_gpu.py ${PYTEST_ARGS:-}
}

head() { benchmark head 240 ${HEAD_ARGS:-}; }

# of_distillation NAME SECONDS ARGUMENT...: beside TRL's and Liger's kernels, where they are packed
of_distillation() {
  local name=$1 limit=$2
  shift 2
  ours "$name" || return
  ! unpack "$files/low.tar.xz" "$low" || PYTHONPATH=$PYTHONPATH:$low
  # in front: datasets must be the one that TRL was packed with
  ! unpack "$files/trl.tar.xz" "$trl" || PYTHONPATH=$PWD:$trl${PYTHONPATH#"$PWD"}
  limited "$name" "$limit" env TRL_EXPERIMENTAL_SILENCE=1 python3 -m benchmarks "$name" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json" "$@" ${DISTILL_ARGS:-}
}

distill() { of_distillation distill 400; }

distill_models() { of_distillation distill_models 300 --repeats 1 "${read_rollouts[@]}"; }

pictures() { benchmark pictures 590 ${PICTURES_ARGS:-}; }

# with fla's kernels; then those of flash-qla, which take 20 s each to compile
recurrence() {
  FLA_FLASH_QLA=0 benchmark recurrence 400 "${read_rollouts[@]}" --rules delta mamba-2 convolution ${RECURRENCE_ARGS:-}
}

recurrence_qla() {
  ours recurrence_qla || return
  limited recurrence_qla 400 python3 -m benchmarks recurrence --rules delta "${read_rollouts[@]}" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/recurrence_qla.json" ${RECURRENCE_ARGS:-}
}

update() { benchmark update 420 "${read_rollouts[@]}" ${UPDATE_ARGS:-}; }

steps() { PARALLEL_ARGS="--sides whole cut steps steps-kept trunks ${STEPS_ARGS:-}" parallel_on 1; }

parallel() { parallel_on "$(nvidia-smi --list-gpus | wc -l)"; }

# layers with recurrences, on two; flash-qla compiles for minutes
parallel_hybrids() {
  parallel_on 2 _hybrids --shape qwen3.5-9b --workloads "airline per turn" --sides ${HYBRID_SIDES:-whole parts}
}

# parallel_on GPUS [SUFFIX ARGUMENT...]: a process a GPU; the suffix is of the name
parallel_on() {
  local name=steps launch=()
  (($1 == 1)) || { name=parallel; launch=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$1"); }
  name+=${2:-}
  shift $(($# > 1 ? 2 : 1))
  ours $name || return
  limited $name 560 python3 "${launch[@]}" -m benchmarks parallel --backend "${BACKEND:-auto}" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json" "${read_rollouts[@]}" "$@" ${PARALLEL_ARGS:-}
}

# a process a GPU, which meet on this machine whatever its name resolves to
update_2gpu() {
  ours update_2gpu || return
  limited update_2gpu 420 python3 -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    -m benchmarks update --fsdp --backend "${BACKEND:-auto}" --commit "$(cat "$files/commit" 2>/dev/null)" \
    --out "$out/update_2gpu.json" "${read_rollouts[@]}" ${UPDATE_ARGS:-}
}

# a process a GPU
megatron_on() {
  local name=megatron
  (($1 == 2)) || name=megatron_4gpu
  ours $name || return
  unpack "$files/megatron.tar.xz" "$megatron" || { failed+=("$name (no $files/megatron.tar.xz)"); return 1; }
  PYTHONPATH=$PYTHONPATH:$megatron OUT=$out/megatron_$1gpu.json limited $name 400 \
    python3 -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$1" \
    -m tests.integrations.megatron.on_gpus ${MEGATRON_ARGS:-}
}

megatron() { megatron_on 2; }

megatron_4gpu() { megatron_on 4; }

# with_verl NAME: ours, and verl
with_verl() {
  ours "$1" || return
  # behind flash-attn-4's, whose namespace it adds to
  ! unpack "$files/verl.tar.xz" "$verl" || PYTHONPATH=$PYTHONPATH:$verl
  python3 -c 'from importlib.metadata import version; print("verl", version("verl"))' ||
    { failed+=("$1 (no verl: no $files/verl.tar.xz)"); return 1; }
}

# on_verl NAME SECONDS GPUS ARGUMENT...: the benchmark under verl, a process a GPU
on_verl() {
  local name=$1 limit=$2 gpus=$3 launch=()
  shift 3
  with_verl "$name" || return
  ((gpus == 1)) || launch=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$gpus")
  # gloo, beside NCCL, meets on this machine too
  limited "$name" "$limit" env GLOO_SOCKET_IFNAME=lo "${keep[@]:1}" python3 "${launch[@]}" -m benchmarks verl_update \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json" "${read_rollouts[@]}" "$@" ${VERL_ARGS:-}
}

# of an 8B model's layers, so many that float32 weights, gradients and AdamW fit; fewer samples in the check
of_8b=(--shape qwen3-8b --layers 8 --checked 4 --repeats 2 --sides verl packed)

verl() { on_verl verl 575 1; }

verl_8b() { on_verl verl_8b 575 1 "${of_8b[@]}"; }

verl_2gpu() { on_verl verl_2gpu 575 2; }

verl_8b_2gpu() { on_verl verl_8b_2gpu 575 2 "${of_8b[@]}"; }

verl_pictures() {
  with_verl verl_pictures || return
  limited verl_pictures 300 env GLOO_SOCKET_IFNAME=lo python3 -m tests.integrations.verl.on_gpu "$out/verl_pictures.json"
}

# with_trl NAME: ours, and TRL
with_trl() {
  ours "$1" || return
  # in front: datasets must be the one that TRL was packed with
  ! unpack "$files/trl.tar.xz" "$trl" || PYTHONPATH=$PWD:$trl${PYTHONPATH#"$PWD"}
  export TRL_EXPERIMENTAL_SILENCE=1
  python3 -c 'from importlib.metadata import version; print("trl", version("trl"))' ||
    { failed+=("$1 (no TRL: no $files/trl.tar.xz)"); return 1; }
}

# on_trl NAME SECONDS GPUS ARGUMENT...: whole steps under TRL, a process a GPU
on_trl() {
  local name=$1 limit=$2 gpus=$3 launch=()
  shift 3
  with_trl "$name" || return
  ((gpus == 1)) || launch=(-m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$gpus")
  limited "$name" "$limit" "${keep[@]}" python3 "${launch[@]}" -m benchmarks run \
    --backend "${BACKEND:-auto}" --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json" "$@" ${RUN_ARGS:-}
}

run() { on_trl run 570 1; }

first_step() { benchmark first_step 575 ${FIRST_STEP_ARGS:-}; }

# TRL's trainer and ours
first_step_trl() {
  with_trl first_step_trl || return
  limited first_step_trl 590 python3 -m benchmarks first_step --trainer trl \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/first_step_trl.json" ${FIRST_STEP_ARGS:-}
}

# a process a GPU; float32 weights, computed in bf16
run_2gpu() {
  on_trl run_2gpu 570 2 --fsdp --repeats 1 --sides trl prefixtree+tree+auto+compiled prefixtree
}

# prompts of 8K for which a cache of keys per row leaves room
run_8k() { on_trl run_8k 570 1 --prompt 8192 --prompts 2; }

run_256() { on_trl run_256 570 1 --prompt 256; }

# TRL's side generates each of four turns anew
run_turns() {
  on_trl run_turns 570 1 --replies 3 --prompt 1024 --repeats 1 --sides trl prefixtree+tree+auto+compiled
}

# twenty steps of either, whose rewards are drawn
run_curves() {
  on_trl run_curves 570 1 --prompt 256 --new 64 --lr 5e-4 --repeats 19 --sides trl prefixtree+tree+auto+compiled
}

# activation offloading with its streams
offloading() {
  with_trl offloading && cuda offloading || return
  limited offloading 200 python3 -m tests.integrations.trl.on_gpu
}

# reports name it by its folder
smollm2=SmolLM2-135M-Instruct

# the pretrained model's folder, whose file comes in halves: two calls, one packed part each
real_model() {
  local half
  mkdir -p "$real"
  for half in real0 real1; do
    ! compgen -G "$files/$half/half*" >/dev/null || cp -r "$files/$half/." "$real/"
  done
  [[ -f $real/half00 && -f $real/half01 ]] || { echo "half of the pretrained model: carry the other"; return 1; }
  [[ -f $real/$smollm2/chat_template.jinja ]] && return
  cat "$real"/half0? >"$real/model.gguf"
  # of an older transformers the tokenizer is another, so it was packed
  PYTHONPATH=$PWD:$real HF_HUB_OFFLINE=1 python3 -m prefixtree.demo.real "$real/$smollm2" "$real/model.gguf" &&
    cp "$real"/tokenizer/* "$real/$smollm2/"
}

# LEARN: names the results
learn() {
  local name=learn${LEARN:+_$LEARN}
  real_model || { failed+=("learn (no pretrained model: $files/real0 and $files/real1)"); return; }
  with_trl "$name" || return
  limited "$name" 590 "${keep[@]}" python3 -m benchmarks learn --model "$real/$smollm2" \
    --commit "$(cat "$files/commit" 2>/dev/null)" --out "$out/$name.json" ${LEARN_ARGS:-}
}

sanitize() {
  ours sanitize && cuda sanitize || return
  local tool sanitizer
  sanitizer=$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)
  local run=(python3 -m pytest -q -m gpu -k sanitize -p no:cacheprovider)
  # once without, so that no kernel is compiled under the sanitizer
  limited sanitize_plain 120 "${run[@]}"
  for tool in memcheck synccheck; do
    # without torch's caching allocator every tensor is an allocation of its own, whose ends are seen
    limited "sanitize_$tool" 220 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool $tool \
      --target-processes all --error-exitcode 9 "${run[@]}"
  done
}

(($#)) || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
for step in "$@"; do
  [[ $step =~ ^(tests|compile|attention|backends|peers_a|peers_b|tune|wide|sanitize|chosen|gathered|depth|peers|layer|model|memory|decode|decode_steps|decode_peers|decode_tries|histories|sampling|head|distill|distill_models|pictures|liger|update|update_best|update_36|update_long|experts|experts_peers|experts_best|low|low_compiled|settings|settings_2gpu|update_2gpu|parallel|parallel_hybrids|steps|megatron|megatron_4gpu|verl|verl_8b|verl_2gpu|verl_8b_2gpu|verl_pictures|first_step|first_step_trl|run|run_2gpu|run_256|run_8k|run_turns|run_curves|offloading|learn|recurrence|recurrence_qla|pack_gqa|shapes|shapes_a|shapes_b|shapes_c)$ ]] || { echo "no step $step"; exit 2; }
done
mkdir -p "$out"
nvidia-smi --query-gpu=name,driver_version,memory.used --format=csv,noheader
unpack "$files/caches.tar.xz" "$caches" || mkdir -p "$caches"
# moved into place, as the machine may take it at any time
bring() {
  local part=$BRING.part.$BASHPID
  tar czf "$part" --exclude="./${BRING##*/}*" -C "$out" . 2>/dev/null
  mv "$part" "$BRING"
}
[[ -z ${BRING:-} ]] || { while sleep 12; do bring; done >/dev/null 2>&1 & trap "kill $!; bring; rm -f '$BRING'.part.*" EXIT; }
for step in "$@"; do "$step"; done
[[ -z ${CACHES:-} ]] || tar cJf "$out/caches.tar.xz" -C "$caches" .
((${#failed[@]})) && { printf 'FAILED: %s\n' "${failed[@]}"; exit 1; }
echo "all done: $*"
