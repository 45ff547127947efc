"""What the requests ask for."""

import json
from pathlib import Path
from typing import Any

import pytest

from exporter.load import mix
from exporter.load.mix import Lengths, Mix
from exporter.strictyaml import ConfigError


def write(tmp_path: Path, name: str, *rows: Any) -> Path:
    path = tmp_path / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_lengths_are_read_and_told_alike() -> None:
    assert (Lengths.parse("256"), str(Lengths(256, 256))) == (Lengths(256, 256), "256")
    assert (Lengths.parse("64-512"), str(Lengths(64, 512))) == (Lengths(64, 512), "64-512")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("many", "must be a number of tokens such as 256, or a range such as 64-512, got 'many'"),
        ("0", "must be 1 to 10000000, the lower end first, got '0'"),
        ("9-3", "must be 1 to 10000000, the lower end first, got '9-3'"),
        ("5-10000001", "must be 1 to 10000000, the lower end first, got '5-10000001'"),
    ],
)
def test_lengths_that_cannot_be(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Lengths.parse(text)


def test_few_requests_have_the_lengths_of_many() -> None:
    """Spread over the range, so that the longest of 100 is the same for every seed."""
    for seed in range(5):
        lengths = Mix(input_tokens=Lengths(1, 100), output_tokens=Lengths(1, 100), seed=seed).lengths(100)
        assert sorted(prompt for prompt, _ in lengths) == sorted(output for _, output in lengths) == list(range(1, 101))
    assert Mix(output_tokens=Lengths(1, 100), seed=1).lengths(100) != Mix(
        output_tokens=Lengths(1, 100), seed=2
    ).lengths(100)


def test_another_level_has_other_words_of_the_same_lengths() -> None:
    made = Mix(model="m", input_tokens=Lengths(2, 9), output_tokens=Lengths(4, 8))
    first, again, other = (list(made.bodies(8, salt)) for salt in ("1", "1", "2"))
    assert first == again
    assert [b["prompt"] for b in first] != [b["prompt"] for b in other]
    sizes = [[(len(b["prompt"].split()), b["max_tokens"]) for b in bodies] for bodies in (first, other)]
    assert sizes[0] == sizes[1]


def test_bodies_of_each_api() -> None:
    lengths = {"model": "m", "input_tokens": Lengths(1, 1), "output_tokens": Lengths(3, 3)}
    (completion,) = Mix(**lengths).bodies(1, "")
    word = completion["prompt"]
    assert completion == {
        "model": "m", "prompt": word, "max_tokens": 3, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip
    (chat,) = Mix(api="chat", stream=False, ignore_eos=False, **lengths).bodies(1, "")
    assert chat == {
        "model": "m", "messages": [{"role": "user", "content": word}], "max_tokens": 3, "stream": False,
    }  # fmt: skip
    (generate,) = Mix(api="generate", **lengths).bodies(1, "")
    assert generate == {"prompt": word, "max_tokens": 3, "stream": True}


def test_a_template_keeps_numbers_numbers(tmp_path: Path) -> None:
    body = {"inputs": "Say: {prompt}!", "parameters": {"max_new_tokens": "{output_tokens}", "stop": ["{prompt}"]}}
    template = mix.template(write(tmp_path, "t.json", body))
    (made,) = Mix(api="generate", template=template, input_tokens=Lengths(1, 1)).bodies(1, "")
    word = made["parameters"]["stop"][0]
    assert made == {"inputs": f"Say: {word}!", "parameters": {"max_new_tokens": 64, "stop": [word]}}


def test_one_body_is_sent_as_it_is(tmp_path: Path) -> None:
    made = Mix(**mix.from_file(write(tmp_path, "request.json", {"prompt": "a", "n": 2})))
    assert list(made.bodies(3, "x")) == [{"prompt": "a", "n": 2}] * 3
    assert made.conditions() == {
        "api": "completions", "stream": True, "requests": made.source,
    }  # fmt: skip
    assert made.source.startswith("request.json, sha256 ")


def test_several_bodies_are_sent_in_turn(tmp_path: Path) -> None:
    made = Mix(**mix.from_file(write(tmp_path, "r.jsonl", {"prompt": "a"}, {"prompt": "b"})))
    assert [body["prompt"] for body in made.bodies(5, "")] == ["a", "b", "a", "b", "a"]


def test_lengths_of_a_file_are_spread_over_it(tmp_path: Path) -> None:
    rows = [{"input_tokens": 10 * n, "output_tokens": n} for n in range(1, 101)]
    made = Mix(**mix.from_file(write(tmp_path, "lengths.jsonl", *rows)))
    assert sorted(made.lengths(4)) == [(130, 13), (380, 38), (630, 63), (880, 88)]
    assert "seed" in made.conditions()
    assert "input_tokens" not in made.conditions()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ((), "{}: holds no request"),
        (('{"a": 1}', "text"), "{}:2: not a JSON object; write one request, or its lengths, a line"),
        (
            ('{"input_tokens": 1, "output_tokens": 1}', '{"input_tokens": 0, "output_tokens": 1}'),
            "{}:2: expected input_tokens and output_tokens, each a whole number, 1 to 10000000",
        ),
        (
            ('{"input_tokens": 1, "output_tokens": 1}', '{"prompt": "a"}'),
            "{}:2: expected input_tokens and output_tokens, each a whole number, 1 to 10000000",
        ),
    ],
)
def test_files_that_hold_no_requests(rows: tuple[str, ...], problem: str, tmp_path: Path) -> None:
    path = write(tmp_path, "r.jsonl", *rows)
    with pytest.raises(ConfigError) as error:
        mix.from_file(path)
    assert error.value.problems == (problem.format(path),)


@pytest.mark.parametrize(
    "row",
    ['{"input_tokens": -1, "output_tokens": 1}', '{"input_tokens": NaN, "output_tokens": 1}',
     '{"input_tokens": 1, "output_tokens": Infinity}', '{"input_tokens": 1}', '{"output_tokens": 1}',
     '{"input_tokens": 10000001, "output_tokens": 1}', '{"input_tokens": 1.5, "output_tokens": 1}', '{"input_tokens": "1", "output_tokens": null}'],
)  # fmt: skip
def test_lengths_that_no_request_has(row: str, tmp_path: Path) -> None:
    good = '{"input_tokens": 1, "output_tokens": 1}'
    for line, rows in ((1, [row]), (1, [row, row]), (3, ["", good, row]), (4, [good, "", good, row])):
        path = write(tmp_path, "r.jsonl", *rows)
        with pytest.raises(ConfigError) as error:
            mix.from_file(path)
        assert error.value.problems == (
            f"{path}:{line}: expected input_tokens and output_tokens, each a whole number, 1 to 10000000",
        )


def test_one_line_of_lengths_is_no_body(tmp_path: Path) -> None:
    made = Mix(**mix.from_file(write(tmp_path, "r.jsonl", {"input_tokens": 2, "output_tokens": 3})))
    assert made.lengths(2) == [(2, 3)] * 2


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        mix.from_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        mix.from_file(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no \{prompt\}: write it where the text of the request goes"):
        mix.template(write(tmp_path, "t.json", {"inputs": "hello"}))
    with pytest.raises(ConfigError, match="not a JSON object"):
        mix.template(write(tmp_path, "t.json", "[1]"))
