#!/usr/bin/env python3
"""Start llama.cpp's own C++ HTTP server in this process, from the prebuilt wheel (pip install xllamacpp).

The wheel compiles in llama.cpp's server (routes, /metrics, /slots, log lines are its own);
only the command line is missing, so the few options that matter are given here.

  python run_llamacpp.py MODEL.gguf [--port 8080] [-np 4] [-c 2048] [-t 2]
                         [--log-file F] [--no-metrics] [--slots] [-lv 3]
"""

import argparse
import signal
import sys
import threading

import xllamacpp


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("model")
    ap.add_argument("--host", default="127.0.0.1")
    ap.add_argument("--port", type=int, default=8080)
    ap.add_argument("--alias", default="tiny")
    ap.add_argument("-np", "--parallel", type=int, default=4)
    ap.add_argument("-c", "--ctx-size", type=int, default=2048)
    ap.add_argument("-b", "--batch-size", type=int)
    ap.add_argument("-t", "--threads", type=int, default=2)
    ap.add_argument("-lv", "--verbosity", type=int)
    ap.add_argument("--kv-unified", action="store_true")
    ap.add_argument("--slots", action="store_true")
    ap.add_argument("--no-metrics", dest="metrics", action="store_false")
    a = ap.parse_args()

    p = xllamacpp.CommonParams()
    p.model.path = a.model
    p.model_alias = [a.alias] if not isinstance(p.model_alias, str) else a.alias
    p.hostnames = [a.host]
    p.port = a.port
    p.n_parallel = a.parallel
    p.n_ctx = a.ctx_size
    if a.batch_size:
        p.n_batch = a.batch_size
    p.kv_unified = a.kv_unified
    p.cpuparams.n_threads = a.threads
    p.endpoint_metrics = a.metrics
    p.endpoint_slots = a.slots
    if a.verbosity is not None:
        p.verbosity = a.verbosity
    try:
        server = xllamacpp.Server(p)
    except Exception as e:
        print(f"server did not start: {e}", file=sys.stderr, flush=True)
        return 1
    print(f"ready {server.listening_address} xllamacpp {xllamacpp.__version__}", file=sys.stderr, flush=True)
    done = threading.Event()
    signal.signal(signal.SIGTERM, lambda *x: done.set())
    signal.signal(signal.SIGINT, lambda *x: done.set())
    done.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
