# The embedded engine as an image: vLLM's CPU build and LMCache, in the locked versions, for the
# profile embedded-docker. Build it with `make image`; see docker/README.md.
#
# BASE needs Debian's apt and Python 3.11 with venv.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Without libnuma vLLM's compiled operators do not load, and the engine dies at its start.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 libgomp1 \
    && rm -rf /var/lib/apt/lists/*

# The main index carries none of the CPU builds of torch: where pip's own sources lack them too,
# PyTorch's index is asked as well.
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu
COPY kvlab/engine/requirements.lock /opt/engine.lock
RUN python3 -m venv /opt/engine \
    && install="/opt/engine/bin/pip install --no-cache-dir --no-deps --requirement /opt/engine.lock" \
    && { $install || $install --extra-index-url "${CPU_WHEELS}"; }

# On this machine kvlab mounts its own package over this copy, which serves a remote engine.
COPY kvlab /opt/kvlab/kvlab
ENV PYTHONPATH=/opt/kvlab
