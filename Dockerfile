# streamserve in a container, for a CPU (the default) or a GPU.
#
#   docker build -t streamserve .
#   docker build -t streamserve:cuda --target cuda .
#   docker run --rm -p 8000:8000 -v streamserve-cache:/cache streamserve [MODEL] [options]
#
# A tag can be moved; a digest cannot. `docker buildx imagetools inspect python:3.11.14-slim-bookworm` shows the one of
# today, and --build-arg BASE_IMAGE=python:3.11.14-slim-bookworm@sha256:… builds on exactly that.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm


# Makes the environments. Dependencies alone, which change seldom: without the sources the layer stays valid.
FROM ${BASE_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 STREAMSERVE_VENV_HOME=/opt/venvs
WORKDIR /app
COPY pyproject.toml ./
COPY requirements requirements
COPY scripts/setup_env.sh scripts/setup_env.py scripts/

FROM build AS build-cpu
RUN scripts/setup_env.sh serve

# The server's user has no compiler. What is compiled runs on any processor that PyTorch runs on.
FROM build-cpu AS kernels-cpu
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY streamserve streamserve
RUN ln -s /opt/venvs/*/ .venv \
    && PYTHONPATH=/app .venv/bin/python -m streamserve.worker.native

# PyTorch of PyPI brings CUDA's libraries and Triton; of the host nothing but the driver is needed.
FROM build AS build-cuda
RUN STREAMSERVE_TORCH=torch scripts/setup_env.sh serve


# What both images have in common.
FROM ${BASE_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="streamserve" \
      org.opencontainers.image.description="An asyncio-native streaming server for large language models" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
RUN groupadd --gid 10001 streamserve \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin streamserve \
    && install -d -o 10001 -g 10001 /cache
# Models that were downloaded or converted, and what compilers keep.
ENV STREAMSERVE_CACHE=/cache HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    STREAMSERVE_HOST=0.0.0.0 STREAMSERVE_PORT=8000 \
    PYTHONPATH=/app PYTHONUNBUFFERED=1
WORKDIR /app
COPY LICENSE ./
COPY deploy/container/healthcheck.py ./
COPY streamserve streamserve
COPY clients/web/public clients/web/public
VOLUME /cache
EXPOSE 8000
# A first start fetches and converts the model, so failures count only after ten minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=3 \
    CMD ["/app/.venv/bin/python", "/app/healthcheck.py"]
# The server itself is process 1: it gets SIGTERM and finishes the open streams.
STOPSIGNAL SIGTERM
ENTRYPOINT ["/app/.venv/bin/python", "-m", "streamserve", "serve"]


FROM runtime AS cuda
# Triton compiles a launcher for each of its kernels, and torch.compile needs the same.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=build-cuda /opt/venvs /opt/venvs
# The import compiles what the children load: the server's user may not write here.
RUN ln -s /opt/venvs/*/ .venv \
    && .venv/bin/python -c "import streamserve.supervisor, streamserve.frontend.process, streamserve.worker.worker"
USER 10001:10001


FROM runtime AS cpu
COPY --from=build-cpu /opt/venvs /opt/venvs
COPY --from=kernels-cpu /app/streamserve/worker/native/built streamserve/worker/native/built
RUN ln -s /opt/venvs/*/ .venv \
    && .venv/bin/python -c "import streamserve.supervisor, streamserve.frontend.process, streamserve.worker.worker"
USER 10001:10001
