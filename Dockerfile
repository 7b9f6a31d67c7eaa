# The image of a worker: `docker build -t taskd .`; `taskd docs containers` explains how to run it.
# Both stages must have the same base, because the second one uses the environment of the first one. For
# reproducible builds, pin the base by digest: --build-arg BASE=python:3.13-slim-trixie@sha256:...
ARG BASE=python:3.13-slim-trixie

FROM ${BASE} AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# The locked packages come first, so that a change of the code downloads nothing. pip checks the hash of
# every file here; the steps below install only from /wheels, without the network.
COPY requirements.lock ./
RUN python -m venv tools \
    && tools/bin/pip download --only-binary :all: --require-hashes -r requirements.lock -d /wheels \
    && tools/bin/pip install --no-index --find-links /wheels hatchling
COPY pyproject.toml README.md LICENSE ./
COPY sql sql
COPY taskd taskd
# The environment in the image contains taskd and its dependencies, but no pip and no build backend.
RUN tools/bin/hatchling build -t wheel -d dist \
    && python -m venv --without-pip /opt/taskd \
    && tools/bin/pip --python /opt/taskd/bin/python install --no-index --find-links /wheels \
        "$(echo dist/*.whl)[mail,web]"

FROM ${BASE}
LABEL org.opencontainers.image.title="pgtaskd" \
      org.opencontainers.image.description="A worker daemon that makes PostgreSQL a job queue" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT"
# The user id is fixed, so that volumes and runAsNonRoot can name it. The user has no home, because taskd
# writes no files. The base has the standard library only as source, so compile it here: otherwise each
# start and each health check would compile it again (0.9 s of CPU instead of 0.3 s).
RUN groupadd --gid 10001 taskd \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin taskd \
    && python -m compileall -q -x site-packages \
        "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY --from=builder /opt/taskd /opt/taskd
# Without a DSN, the worker ends with exit code 78, and does not start an embedded database.
ENV PATH=/opt/taskd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TASKD_EMBEDDED=off \
    TASKD_LOG_FORMAT=json
# Copy your code to this directory: taskd imports TASKD_APP from the current directory.
WORKDIR /app
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=15s --start-period=30s --retries=3 \
    CMD ["taskd", "health", "--worker"]
# Without a shell, taskd is process 1 and receives the signals itself.
ENTRYPOINT ["taskd"]
CMD ["run"]
