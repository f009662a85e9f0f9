#!/usr/bin/env bash
# Three workers with the demo model behind Dynamo's real frontend, on this machine alone: no etcd, NATS or Kubernetes.
# Shows what docs/cluster.md says, and fails if any of it does not hold. A minute after the builds. ONLY=overhead measures
# what Dynamo's layers cost instead (docs/cluster.md, "What it costs").
#
#     integrations/dynamo/try.sh            builds the worker (about 870 crates, the first time 20 minutes on two cores)
#     integrations/dynamo/try.sh BINARY     takes one that was built
#
# With etcd and NATS, started before: DYN_DISCOVERY_BACKEND=etcd ETCD_ENDPOINTS=http://127.0.0.1:2379
# DYN_EVENT_PLANE=nats NATS_SERVER=nats://127.0.0.1:4222 integrations/dynamo/try.sh
#
# PYTHON names a Python with the frontend's packages; without it one is made beside the build, from PyPI.
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
        # Its dependency aisimulate is a placeholder on PyPI, which the frontend runs without.
        "$venv/bin/pip" -q install --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
        "$venv/bin/pip" -q install aiohttp msgspec prometheus-client pyzmq redis uvloop "pydantic<=2.13.5" zstandard \
            "kubernetes<33" transformers openai
    fi
fi
exec "$PYTHON" "$here/try.py" "$worker" "$here/../../model/demo"
