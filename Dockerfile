# The image of a worker: `docker build -t taskd .`; `taskd docs containers` tells how to run it.
# Both stages must have the same base, for the environment made in one is used in the other. Pin it by
# digest where builds must repeat: --build-arg BASE=python:3.13-slim-trixie@sha256:...
ARG BASE=python:3.13-slim-trixie

FROM ${BASE} AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# What is locked first, so that a change of the code downloads nothing. Every file is checked against
# its hash here; the steps below take their packages from /wheels alone, without the network.
COPY requirements.lock ./
RUN python -m venv tools \
    && tools/bin/pip download --only-binary :all: --require-hashes -r requirements.lock -d /wheels \
    && tools/bin/pip install --no-index --find-links /wheels hatchling
COPY pyproject.toml README.md LICENSE ./
COPY sql sql
COPY taskd taskd
# The environment that is kept holds no pip and no build backend, only taskd and what it needs.
RUN tools/bin/hatchling build -t wheel -d dist \
    && python -m venv --without-pip /opt/taskd \
    && tools/bin/pip --python /opt/taskd/bin/python install --no-index --find-links /wheels \
        "$(echo dist/*.whl)[mail,web]"

FROM ${BASE}
LABEL org.opencontainers.image.title="pgtaskd" \
      org.opencontainers.image.description="A worker daemon that makes PostgreSQL a job queue" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="MIT"
# A fixed number, so that volumes and runAsNonRoot can name it. No home: nothing is ever written. That is
# why the standard library is compiled here: the base has it as source, and each start and each health
# check would compile it anew (0.9 s of CPU in place of 0.3).
RUN groupadd --gid 10001 taskd \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent \
        --shell /usr/sbin/nologin taskd \
    && python -m compileall -q -x site-packages \
        "$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
COPY --from=builder /opt/taskd /opt/taskd
# A forgotten DSN ends the worker with exit code 78, in place of a queue that nobody else sees.
ENV PATH=/opt/taskd/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    TASKD_EMBEDDED=off \
    TASKD_LOG_FORMAT=json
# Your code goes here: taskd imports TASKD_APP from the current directory.
WORKDIR /app
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=30s --timeout=15s --start-period=30s --retries=3 \
    CMD ["taskd", "health", "--worker"]
# No shell in between: taskd is process 1 and hears the signals itself.
ENTRYPOINT ["taskd"]
CMD ["run"]
