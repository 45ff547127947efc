"""An LLM inference server in miniature: vLLM's scheduling, metrics, log and API without a model or a GPU.

For `stopline demo`, for tests of meaning, and as the ground truth accuracy is measured against.

In virtual time, thousands of times faster than a real server:

    engine = Engine(EngineConfig.hy3_h20(), seed=1)
    truth = simulate(engine, Poisson(3.0, seed=1), 600, on_poll=lambda now, page: ...)
    truth.quantile("queue_wait", 0.99)

In real time, over HTTP:

    async with serve(Simulation(EngineConfig.tiny(), log=Path("vllm.log")), port=8000) as url:
        ...
"""

from .config import EngineConfig
from .engine import FAULTS, Engine
from .load import Bursts, ClosedLoop, OpenLoop, Poisson, Segment
from .log import Log, LogOptions
from .metrics import Page
from .records import Observer, Request, RequestRecord, StepRecord
from .server import build_app, serve
from .simulation import Simulation
from .truth import Truth, exact_quantile
from .virtual import simulate

__all__ = [
    "FAULTS",
    "Bursts",
    "ClosedLoop",
    "Engine",
    "EngineConfig",
    "Log",
    "LogOptions",
    "Observer",
    "OpenLoop",
    "Page",
    "Poisson",
    "Request",
    "RequestRecord",
    "Segment",
    "Simulation",
    "StepRecord",
    "Truth",
    "build_app",
    "exact_quantile",
    "serve",
    "simulate",
]
