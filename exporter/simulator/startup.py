"""The lines of a start and of a planned stop, as far as a reader of logs takes facts from them.

Shapes: recorded from vLLM 0.32.0 serving the Hy3 architecture on CPU; the lines only a GPU server prints
(model loading, KV cache memory, expert ranks, graphs) after vLLM's own format strings.
"""

from collections.abc import Iterator

from .config import GIB, EngineConfig
from .lines import API_PID, CORE, CORE_PID, Line, api, bare, core, workers


def starting(config: EngineConfig, host: str, port: int) -> Iterator[Line]:
    yield api("api_utils.py:286", f"non-default args: {_non_default_args(config, host, port)}")
    yield api("model.py:733", f"Resolved architecture: {config.architecture}")
    yield api("model.py:2152", f"Using max model len {config.max_model_len}")
    batched = config.max_batched_tokens
    yield api("scheduler.py:262", f"Chunked prefill is enabled with max_num_batched_tokens={batched}.")
    engine = f"Initializing a V1 LLM engine (v{config.version}) with config: {engine_config(config)}"
    yield core("core.py:133", engine)
    for rank, worker in enumerate(workers(config)):
        for where, text in _loading(config, rank):
            yield Line(worker, "INFO", where, text)
    yield core("kv_cache_utils.py:2327", _kv_cache_size(config))
    graphs = "Graph capturing finished in 21 secs, took 1.02 GiB"
    yield Line(workers(config)[0], "INFO", "gpu_model_runner.py:6110", graphs)
    yield core("core.py:402", "init engine (profile, create kv cache, warmup model) took 64.18 s")
    yield api("entry.py:136", "Supported tasks: ['generate']")
    yield api("entry.py:140", f"Starting vLLM server on http://{host}:{port}")
    yield api("launcher.py:186", "Available routes are:")
    for path, methods in (("/health", "GET"), ("/metrics", "GET"), ("/v1/completions", "POST")):
        yield api("launcher.py:195", f"Route: {path}, Methods: {methods}")
    yield bare(f"INFO:     Started server process [{API_PID}]")
    yield bare("INFO:     Waiting for application startup.")
    yield bare("INFO:     Application startup complete.")


def stopping(config: EngineConfig, output_handler_failed: Line) -> Iterator[Line]:
    """On SIGTERM.  *output_handler_failed*, an error with traceback, is part of it and no failure."""
    yield api("launcher.py:254", "[shutdown] API server: shutdown triggered")
    yield api("launcher.py:270", "[shutdown] API server: stopping engine client mode=abort timeout=0s")
    yield api("core_client.py:770", "[shutdown] MPClient: start timeout=0s")
    yield api("utils.py:628", "[shutdown] Process manager: send sigterm to process EngineCore")
    yield core("core.py:1454", "[shutdown] EngineCore: trigger received signal=SIGTERM")
    yield core("core.py:1635", "[shutdown] EngineCore: start mode=abort timeout=0s")
    complete = "[shutdown] EngineCore: request processing complete; starting resource teardown"
    yield core("core.py:1666", complete)
    yield core("core.py:1499", "[shutdown] EngineCore: exiting busy loop")
    for worker in workers(config):
        if worker != CORE:
            text = "Parent process exited, terminating worker queues"
            yield Line(worker, "INFO", "multiproc_executor.py:843", text)
    killing = f"[shutdown] Process manager: force killing remaining process EngineCore pid {CORE_PID}"
    yield api("utils.py:653", killing, "WARNING")
    yield api("core_client.py:777", "[shutdown] MPClient: complete")
    yield output_handler_failed
    yield api("launcher.py:279", "[shutdown] API server: engine client stopped")
    yield api("launcher.py:304", "[shutdown] API server: shutting down FastAPI HTTP server")
    yield bare("INFO:     Shutting down")
    yield bare("INFO:     Waiting for application shutdown.")
    yield bare("INFO:     Application shutdown complete.")


def engine_config(config: EngineConfig) -> str:
    """The beginning of the very long list, and of its rest what names a limit or an identity."""
    path = f"/models/{config.model}"
    return (
        f"model='{path}', speculative_config=None, tokenizer='{path}', skip_tokenizer_init=False, "
        "tokenizer_mode=auto, revision=None, tokenizer_revision=None, trust_remote_code=False, "
        f"dtype=torch.{config.dtype}, max_seq_len={config.max_model_len}, download_dir=None, "
        f"load_format=auto, tensor_parallel_size={config.tensor_parallel}, pipeline_parallel_size=1, "
        "data_parallel_size=1, decode_context_parallel_size=1, dcp_comm_backend=ag_rs, "
        "disable_custom_all_reduce=False, quantization=None, quantization_config=None, enforce_eager=False, "
        f"kv_cache_dtype=auto, device_config=cuda, seed=0, served_model_name={config.model}, "
        "enable_prefix_caching=True, enable_chunked_prefill=True, pooler_config=None"
    )


def _non_default_args(config: EngineConfig, host: str, port: int) -> dict[str, object]:
    path = f"/models/{config.model}"
    arguments: dict[str, object] = {"model_tag": path, "host": host, "port": port, "model": path}
    arguments |= {"max_model_len": config.max_model_len, "served_model_name": [config.model]}
    if config.tensor_parallel > 1:
        arguments["tensor_parallel_size"] = config.tensor_parallel
    if config.split_experts:
        arguments["enable_expert_parallel"] = True
    arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    arguments["max_num_batched_tokens"] = config.max_batched_tokens
    arguments["max_num_seqs"] = config.max_running_requests
    if config.max_queued_requests is not None:
        arguments["max_num_queued_reqs"] = config.max_queued_requests
    return arguments


def _loading(config: EngineConfig, rank: int) -> Iterator[tuple[str, str]]:
    """Where and what, for one rank."""
    size, method = config.gpus, "distributed_init_method=tcp://127.0.0.1:41337 backend=nccl"
    yield "parallel_state.py:1906", f"world_size={size} rank={rank} local_rank={rank} {method}"
    expert_rank = rank if config.split_experts else "N/A"
    yield (
        "parallel_state.py:2350",
        f"rank {rank} in world size {size} is assigned as DP rank 0, PP rank 0, PCP rank 0, TP rank {rank}, "
        f"ETP rank 0, EP rank {expert_rank}, EPLB rank N/A",
    )
    yield "gpu_model_runner.py:4712", f"Starting to load model /models/{config.model}..."
    if config.split_experts:
        yield "expert_map_manager.py:118", _expert_placement(config, rank)
    yield "default_loader.py:501", "Loading weights took 41.27 seconds"
    weights = f"{config.weights_bytes / GIB:.2f} GiB memory"
    yield "gpu_model_runner.py:4879", f"Model loading took {weights} and 43.518204 seconds"
    yield "gpu_worker.py:431", f"Available KV cache memory: {config.kv_bytes / GIB:.2f} GiB"


def _expert_placement(config: EngineConfig, rank: int) -> str:
    local = config.experts // config.gpus
    mapping = ", ".join(f"{index}->{rank * local + index}" for index in range(local))
    return (
        f"[EP Rank {rank}/{config.gpus}] Expert parallelism is enabled. Expert placement strategy: linear. "
        f"Local/global number of experts: {local}/{config.experts}. "
        f"Experts local to global index map: {mapping}."
    )


def _kv_cache_size(config: EngineConfig) -> str:
    tokens, longest = config.kv_tokens, config.max_model_len
    return (
        f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {longest:,} tokens per request: "
        f"{tokens / longest:.2f}x"
    )
