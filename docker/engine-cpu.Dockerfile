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

# PyTorch's index of CPU builds: the main index carries none of the version that vLLM asks for.
ARG CPU_WHEELS=https://download.pytorch.org/whl/cpu
COPY kvlab/engine/requirements.lock /opt/engine.lock
RUN python3 -m venv /opt/engine \
    && /opt/engine/bin/pip install --no-cache-dir --no-deps --disable-pip-version-check \
        --extra-index-url "${CPU_WHEELS}" --requirement /opt/engine.lock

# On this machine kvlab mounts its own package over this copy, which serves a remote engine.
COPY kvlab /opt/kvlab/kvlab
ENV PYTHONPATH=/opt/kvlab
