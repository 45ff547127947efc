"""Which GPUs are watched, by every form of the setting and by what an engine's process may use."""

import os

import pytest

from exporter.sources.devices import choose, find_engines, parse, pick, seen_by
from exporter.sources.nvml import Device

A, B, C = (Device(str(i), f"GPU-{x}aa-0000") for i, x in enumerate("abc"))
M0, M2 = (Device(f"1.{i}", f"MIG-{i}aa-0000", "H100", "1g.10gb", "GPU-baa-0000") for i in (0, 2))
WHOLE = [A, B, C]
SPLIT = [A, M0, M2, C]


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("auto", ("auto",)),
        ("all", ("all",)),
        ("0, GPU-b", ("0", "GPU-b")),
        ([1, "MIG-x"], ("1", "MIG-x")),
    ],
)
def test_the_setting_is_a_list_or_a_string_with_commas(setting, names):
    assert parse(setting) == names


@pytest.mark.parametrize(
    ("name", "devices", "chosen"),
    [
        pytest.param("1", WHOLE, [B], id="index"),
        pytest.param("GPU-baa-0000", WHOLE, [B], id="uuid"),
        pytest.param("gpu-BAA-0000", WHOLE, [B], id="uuid in other letters"),
        pytest.param("GPU-b", WHOLE, [B], id="prefix"),
        pytest.param("GPU-", WHOLE, [], id="prefix of several"),
        pytest.param("GPU-baa", [B, Device("3", "GPU-baa")], [Device("3", "GPU-baa")], id="a uuid that is a prefix"),
        pytest.param("1", SPLIT, [M0, M2], id="index of a GPU that is split"),
        pytest.param("GPU-b", SPLIT, [M0, M2], id="uuid of a GPU that is split"),
        pytest.param("1.2", SPLIT, [M2], id="instance"),
        pytest.param("1:2", SPLIT, [M2], id="instance as the container toolkit writes it"),
        pytest.param("MIG-2aa-0000", SPLIT, [M2], id="uuid of an instance"),
        pytest.param("MIG-2", SPLIT, [M2], id="prefix of an instance"),
        pytest.param("MIG-", SPLIT, [], id="prefix of several instances"),
        pytest.param("3", WHOLE, [], id="index that is not there"),
        pytest.param("1.1", SPLIT, [], id="instance that is not there"),
        pytest.param("", WHOLE, [], id="nothing"),
        pytest.param("b", WHOLE, [], id="neither"),
    ],
)
def test_a_name(name, devices, chosen):
    assert pick([name], devices) == (chosen, [] if chosen else [name])


def test_names_give_devices_once_and_in_order():
    assert pick(["GPU-c", "0", "2", "9"], WHOLE) == ([A, C], ["9"])


@pytest.mark.parametrize(
    ("nvidia", "cuda", "devices", "chosen", "missing"),
    [
        (None, None, WHOLE, WHOLE, []),
        ("all", None, WHOLE, WHOLE, []),
        ("void", None, WHOLE, WHOLE, []),
        ("", None, WHOLE, WHOLE, []),
        ("none", None, WHOLE, [], []),
        ("none", "0", WHOLE, [], ["0"]),
        ("1", None, WHOLE, [B], []),
        ("GPU-c,GPU-a", None, WHOLE, [A, C], []),
        ("GPU-zzz,GPU-a", None, WHOLE, [A], ["GPU-zzz"]),
        ("nvidia.com/gpu=2", None, WHOLE, [C], []),
        ("runtime.nvidia.com/gpu=all", None, WHOLE, WHOLE, []),
        ("4,5,6", None, WHOLE, WHOLE, []),
        ("4,5", None, WHOLE, [], ["4", "5"]),
        ("1:2", None, SPLIT, [M2], []),
        (None, "", WHOLE, [], []),
        (None, "-1", WHOLE, [], []),
        (None, "NoDevFiles", WHOLE, [], []),
        (None, "1", WHOLE, [B], []),
        (None, "2, 0", WHOLE, [A, C], []),
        (None, "0,-1,1", WHOLE, [A], []),
        (None, "0,7,1", WHOLE, [A], ["7"]),
        (None, "GPU-b", WHOLE, [B], []),
        (None, "GPU-baa-0000", WHOLE, [B], []),
        (None, "MIG-2aa-0000", SPLIT, [M2], []),
        (None, "1", SPLIT, [M0], []),
        (None, "2", SPLIT, [C], []),
        ("1,2", "0", WHOLE, [B], []),
        ("GPU-b,GPU-c", "1", WHOLE, [C], []),
        ("GPU-c", "GPU-c", WHOLE, [C], []),
    ],
)
def test_what_a_process_may_use(nvidia, cuda, devices, chosen, missing):
    environ = {"NVIDIA_VISIBLE_DEVICES": nvidia, "CUDA_VISIBLE_DEVICES": cuda}
    assert seen_by({k: v for k, v in environ.items() if v is not None}, devices) == (chosen, missing)


CUDA_0, CUDA_2, CUDA_NONE = ({"CUDA_VISIBLE_DEVICES": v} for v in ("0", "2", ""))
LAUNCHER = {"NVIDIA_VISIBLE_DEVICES": "all"}


@pytest.mark.parametrize(
    ("engines", "own", "chosen"),
    [
        pytest.param([CUDA_0, CUDA_2], {}, [A, C], id="ranks with one GPU each"),
        pytest.param([LAUNCHER, CUDA_2], {}, [C], id="a launcher that leaves the choice to its ranks"),
        pytest.param([LAUNCHER, CUDA_NONE], {}, WHOLE, id="a helper without GPU"),
        pytest.param([CUDA_NONE], {}, [], id="an engine without GPU"),
        pytest.param([CUDA_0], CUDA_2, [A], id="the engine's before ours"),
        pytest.param([], CUDA_2, [C], id="ours"),
        pytest.param([], {"NVIDIA_VISIBLE_DEVICES": "GPU-b"}, [B], id="ours, not applied"),
        pytest.param([], {"NVIDIA_VISIBLE_DEVICES": "2,5,7"}, WHOLE, id="ours, applied"),
        pytest.param([], {"NVIDIA_VISIBLE_DEVICES": "2,5"}, WHOLE, id="ours, applied to more"),
        pytest.param([], {"NVIDIA_VISIBLE_DEVICES": "none"}, [], id="ours is none"),
        pytest.param([], {}, WHOLE, id="nothing known"),
    ],
)
def test_auto(engines, own, chosen):
    assert choose(("auto",), WHOLE, engines, own) == (chosen, [])


def test_all_and_names_do_not_ask_the_engine():
    assert choose(("all",), WHOLE, [CUDA_0], CUDA_0) == (WHOLE, [])
    assert choose(("1",), WHOLE, [CUDA_0], CUDA_0) == ([B], [])


def process(proc, pid, argv, **environ):
    (folder := proc / str(pid)).mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"".join(a.encode() + b"\0" for a in argv.split()))
    (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in environ.items()))
    return folder


@pytest.mark.parametrize(
    ("argv", "is_engine"),
    [
        ("/usr/bin/python3 /usr/local/bin/vllm serve Qwen/Qwen3-8B", True),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", True),
        ("/opt/venv/bin/python3.12 -u -X dev -m sglang.launch_server", True),
        ("VLLM::EngineCore", True),
        ("sglang::scheduler_TP0", True),
        ("/app/llama-server -m model.gguf", True),
        ("text-generation-launcher --model-id m", True),
        ("/usr/bin/python3 /opt/conda/bin/text_generation_server serve m", True),
        ("trtllm-serve m", True),
        ("/opt/tritonserver/bin/tritonserver --model-repository /models", True),
        ("/usr/bin/python3 /usr/local/bin/lmdeploy serve api_server m", True),
        ("python3 -m dynamo.frontend", True),
        ("deepinfer --port 8000", True),
        ("/usr/bin/python3 /usr/local/bin/stopline run --engine vllm", False),
        ("python3 -m exporter run --engine vllm", False),
        ("python3 -c print('vllm')", False),
        ("tail -F /var/log/vllm.log", False),
        ("/vllm/bin/python3 app.py", False),
        ("python3", False),
        ("python3 -m", False),
        ("", False),
    ],
)
def test_what_counts_as_an_engine(tmp_path, argv, is_engine):
    process(tmp_path, 7, argv, CUDA_VISIBLE_DEVICES="1")
    assert find_engines(tmp_path) == ([{"CUDA_VISIBLE_DEVICES": "1"}] if is_engine else [])


def test_of_an_environment_only_the_two_variables_are_taken(tmp_path):
    process(tmp_path, 7, "vllm", SECRET="x", NVIDIA_VISIBLE_DEVICES="GPU-b", CUDA_VISIBLE_DEVICES="")
    process(tmp_path, 8, "vllm", CUDA_VISIBLE_DEVICES="", NVIDIA_VISIBLE_DEVICES="GPU-b")
    process(tmp_path, 9, "vllm", HOME="/")
    process(tmp_path, os.getpid(), "vllm", CUDA_VISIBLE_DEVICES="2")
    assert find_engines(tmp_path) == [{"NVIDIA_VISIBLE_DEVICES": "GPU-b", "CUDA_VISIBLE_DEVICES": ""}]


def test_what_cannot_be_read_is_passed_over(tmp_path):
    (process(tmp_path, 7, "vllm", CUDA_VISIBLE_DEVICES="0") / "environ").unlink()
    (process(tmp_path, 8, "vllm", CUDA_VISIBLE_DEVICES="0") / "cmdline").unlink()
    (tmp_path / "9").write_text("not a folder")
    (process(tmp_path, 10, "vllm") / "environ").write_bytes(b"\xff\xfe=\xff\0CUDA_VISIBLE_DEVICES=1\0noise")
    assert find_engines(tmp_path) == [{"CUDA_VISIBLE_DEVICES": "1"}]
    assert find_engines(tmp_path / "missing") == []


def test_the_processes_of_this_machine_can_be_looked_through():
    find_engines()
