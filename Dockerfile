# A server for machines without a GPU.
#
#   docker build -t streamserve .
#   docker run --rm -p 8000:8000 -v streamserve-cache:/cache streamserve [MODEL] [options]
FROM python:3.12-slim

RUN useradd --create-home --uid 10001 streamserve && install -d -o streamserve /cache

WORKDIR /app

# Dependencies first: they change seldom, and this layer is the large one.
COPY pyproject.toml ./
COPY requirements requirements
COPY scripts scripts
RUN STREAMSERVE_VENV_HOME=/opt/venvs PIP_NO_CACHE_DIR=1 scripts/setup_env.sh serve

COPY LICENSE README.md ./
COPY streamserve streamserve
COPY clients/web/public clients/web/public
ENV PYTHONPATH=/app
# Compiles what the children load; the server's user may not write here.
RUN .venv/bin/python -c "import streamserve.supervisor, streamserve.frontend.process, streamserve.worker.worker"

USER streamserve
# Converted and downloaded models.
ENV STREAMSERVE_CACHE=/cache HF_HOME=/cache/huggingface PYTHONUNBUFFERED=1
VOLUME /cache
EXPOSE 8000

HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD [".venv/bin/python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]

# The server itself is process 1: it gets SIGTERM and finishes the open streams.
ENTRYPOINT [".venv/bin/python", "-m", "streamserve", "serve", "--host", "0.0.0.0", "--port", "8000"]
