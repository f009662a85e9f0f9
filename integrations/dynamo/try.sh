#!/usr/bin/env bash
# Three workers with the demo model behind Dynamo's real frontend on this machine: no etcd, NATS or
# Kubernetes. Runs the checks that docs/cluster.md lists and fails if a check fails. The checks take
# a minute after the builds. ONLY=overhead measures the cost of Dynamo's layers instead
# (docs/cluster.md, "What it costs").
#
#     integrations/dynamo/try.sh            builds the worker (about 900 crates; the first build takes 10 to 20 minutes on two cores)
#     integrations/dynamo/try.sh BINARY     uses a worker that was built before
#
# With etcd and NATS that already run: DYN_DISCOVERY_BACKEND=etcd ETCD_ENDPOINTS=http://127.0.0.1:2379
# DYN_EVENT_PLANE=nats NATS_SERVER=nats://127.0.0.1:4222 integrations/dynamo/try.sh
#
# PYTHON names a Python with the frontend's packages. By default a virtual environment is made next
# to the build, from PyPI.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
target="${CARGO_TARGET_DIR:-$here/target}"
worker="${1:-}"
if [ -z "$worker" ]; then
    (cd "$here" && cargo build --locked --bin bursar-dynamo)
    worker="$target/debug/bursar-dynamo"
fi
if [ -z "${PYTHON:-}" ]; then
    venv="$target/frontend"
    PYTHON="$venv/bin/python"
    if ! "$PYTHON" -c "import dynamo.frontend, openai" 2>/dev/null; then
        python3 -m venv "$venv"
        # The dependency aisimulate is a placeholder on PyPI. The frontend runs without it.
        "$venv/bin/pip" -q install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
        "$venv/bin/pip" -q install aiohttp msgspec prometheus-client pyzmq redis uvloop "pydantic<=2.13.5" zstandard \
            "kubernetes<33" transformers openai
    fi
fi
exec "$PYTHON" "$here/try.py" "$worker" "$here/../../model/demo"
