# Image of the coordinator: the training loop, the daemon and the CLI, without torch.
#   docker build -f deploy/coordinator.Dockerfile --target cpu -t lockstep-coordinator .
# A layer for the locked packages and one for the wheel: after a change of the code only the second is made again.
FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b AS source
WORKDIR /src
COPY requirements/build.txt requirements/
RUN python -m venv /opt/build
RUN /opt/build/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/build.txt
COPY pyproject.toml README.md ./
COPY protos/lockstep protos/lockstep
COPY services/__init__.py services/
COPY services/common services/common
COPY services/coordinator services/coordinator
RUN /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b AS cpu-packages
WORKDIR /src
COPY requirements/coordinator-cpu.txt requirements/
RUN python -m venv /opt/lockstep
RUN /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/coordinator-cpu.txt

FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b AS cpu
COPY --from=cpu-packages /opt/lockstep /opt/lockstep
RUN useradd --uid 10001 --create-home lockstep && install --directory --owner lockstep /certificates /work /work/runs
RUN --mount=type=bind,from=source,source=/wheel,target=/wheel /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --no-index --find-links /wheel lockstep-rl
USER 10001
WORKDIR /home/lockstep
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["lockstep-health", "127.0.0.1:50051", "--tls", "/certs"]
ENTRYPOINT ["lockstep"]
CMD ["coordinator", "serve", "--listen", "0.0.0.0:50051", "--tls", "/certs"]
