# A server for one model, mounted at /model: see docs/serving.md.
FROM python:3.11-slim
WORKDIR /build
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY vitrail vitrail
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
      -c constraints.txt '.[serve,fast,onnx]' && rm -rf /build
RUN useradd --system --uid 10001 --no-create-home vitrail
USER 10001
WORKDIR /
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp VITRAIL_CACHE=/tmp/vitrail
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=5)"]
# Reachable from other machines, so a token is required: set VITRAIL_TOKEN, or add --no-token.
ENTRYPOINT ["vitrail", "serve", "/model", "--host", "0.0.0.0"]
