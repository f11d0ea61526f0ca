# Image of the trainer, which runs FSDP2 and Megatron-Core under torchrun.
#   docker build -f deploy/trainer.Dockerfile --target cpu -t lockstep-trainer .
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
COPY services/trainer services/trainer
RUN /opt/build/bin/python -m pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b AS cpu-packages
WORKDIR /src
COPY requirements/cpu-torch.txt requirements/trainer-cpu.txt requirements/
RUN python -m venv /opt/lockstep
RUN /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --index-url https://download.pytorch.org/whl/cpu -r requirements/cpu-torch.txt
RUN /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/trainer-cpu.txt

FROM python:3.11-slim-bookworm@sha256:0bee7276f83efd4a1ee05bbbf4281d95ed28e079220a9457f25a93e3f1e3c31b AS cpu
COPY --from=cpu-packages /opt/lockstep /opt/lockstep
RUN useradd --uid 10001 --create-home lockstep && install --directory --owner lockstep /certificates /work /work/runs
RUN --mount=type=bind,from=source,source=/wheel,target=/wheel /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --no-index --find-links /wheel lockstep-rl
USER 10001
WORKDIR /home/lockstep
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["lockstep-health", "127.0.0.1:50051", "--tls", "/certs"]
ENTRYPOINT ["torchrun"]
CMD ["--standalone", "--nproc-per-node", "1", "-m", "services.trainer", "--listen", "0.0.0.0:50051", "--tls", "/certs"]

FROM ubuntu:24.04@sha256:69cecf4bbf72d2d44a9eef1b71fb98c7fb973d78af11399deccef19beb008ad9 AS cuda-packages
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY requirements/trainer-cuda.txt requirements/
RUN python3 -m venv /opt/lockstep
RUN /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --require-hashes -r requirements/trainer-cuda.txt

# TransformerEngine publishes its torch bindings as source only, so compile them once, with CUDA's compiler.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04@sha256:e071e85c52ad91fc9ea24158ff5330876b2d1a5c4ac83ccc6066976835873c01 AS transformer-engine
RUN apt-get update && apt-get install -y --no-install-recommends python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-packages /opt/lockstep /opt/lockstep
WORKDIR /src
COPY requirements/trainer-cuda-source.txt requirements/
RUN MAX_JOBS=8 NVTE_FRAMEWORK=pytorch /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --no-build-isolation --require-hashes -r requirements/trainer-cuda-source.txt

FROM ubuntu:24.04@sha256:69cecf4bbf72d2d44a9eef1b71fb98c7fb973d78af11399deccef19beb008ad9 AS cuda
# Triton and torch.compile need a compiler to build kernels at their first use.
RUN apt-get update && apt-get install -y --no-install-recommends gcc g++ python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
COPY --from=transformer-engine /opt/lockstep /opt/lockstep
RUN useradd --uid 10001 --create-home lockstep && install --directory --owner lockstep /certificates /work /work/runs
RUN --mount=type=bind,from=source,source=/wheel,target=/wheel /opt/lockstep/bin/python -m pip install --no-cache-dir --no-deps --no-index --find-links /wheel lockstep-rl
USER 10001
WORKDIR /home/lockstep
ENV PATH=/opt/lockstep/bin:$PATH PYTHONUNBUFFERED=1 NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 50051
HEALTHCHECK --interval=10s --timeout=6s --start-period=120s CMD ["lockstep-health", "127.0.0.1:50051", "--tls", "/certs"]
ENTRYPOINT ["torchrun"]
CMD ["--standalone", "--nproc-per-node", "1", "-m", "services.trainer", "--listen", "0.0.0.0:50051", "--tls", "/certs"]
