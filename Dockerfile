# syntax=docker/dockerfile:1
FROM python:3.12-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN python -m venv /opt/venv
RUN /opt/venv/bin/pip install --no-cache-dir '.[otlp,openvino]'

FROM python:3.12-slim
RUN useradd --uid 10002 --user-group --no-create-home --shell /usr/sbin/nologin bge
RUN mkdir /cache && chown bge:bge /cache
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HF_HOME=/cache/huggingface
USER bge
VOLUME /cache
EXPOSE 8081
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["bge-m3-server", "healthcheck"]
CMD ["bge-m3-server", "serve"]
