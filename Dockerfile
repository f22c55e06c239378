# docker build -t prefixtree .
# docker run --rm --gpus all -v "$PWD:/data" prefixtree report rollouts.jsonl
# devel: Triton calls a C compiler, and the extra qla wants nvcc
FROM pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
# Python of the distribution, for which pip asks; a torch that is installed stays as it is
ENV PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /opt/prefixtree
COPY pyproject.toml README.md LICENSE ./
COPY prefixtree prefixtree
# this folder and its extras, which the rule takes for a package without a version
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[train,fa4,qla,parquet,images]'
WORKDIR /data
ENTRYPOINT ["prefixtree"]
CMD ["doctor"]
