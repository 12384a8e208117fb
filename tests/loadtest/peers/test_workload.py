"""Models, prompts and cases that all servers are given."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from loadtest.peers.models import ServedModel, prepare_model
from loadtest.peers.prompts import PromptMaker
from loadtest.peers.workload import SHAPES, Limits, cases_of, limits_for


def test_the_tiny_model_is_a_file_and_a_folder_and_made_once(tiny: ServedModel) -> None:
    config = json.loads((tiny.folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (2, 64, 512)
    assert config["torch_dtype"] == "bfloat16"
    # Two layers, key and value, one head of 32 values of 2 bytes.
    assert tiny.kv_token_bytes == 256
    made = tiny.gguf.stat().st_mtime_ns
    assert prepare_model("tiny") == tiny
    assert tiny.gguf.stat().st_mtime_ns == made


def test_there_is_no_other_model(tiny: ServedModel) -> None:
    with pytest.raises(ValueError, match="no model is called huge"):
        prepare_model("huge")


@pytest.mark.parametrize("num_tokens", [1, 2, 32, 1000])
def test_prompts_have_the_tokens_asked_for(tiny: ServedModel, num_tokens: int) -> None:
    maker = PromptMaker(tiny.folder)
    assert maker.count(maker.make(num_tokens, "seed")) == num_tokens


def test_prompts_differ_but_in_what_they_share(tiny: ServedModel) -> None:
    maker = PromptMaker(tiny.folder)
    prompts = maker.prompts(count=4, num_tokens=100, shared_tokens=90, seed="s")
    shared = maker.shared(90, "s")
    assert all(prompt.startswith(shared) and maker.count(prompt) == 100 for prompt in prompts)
    assert len(set(prompts)) == 4
    assert prompts == maker.prompts(4, 100, 90, "s")
    assert not set(prompts) & set(maker.prompts(4, 100, 90, "t"))


def test_cases_are_every_shape_with_every_number_of_streams() -> None:
    names = [case.name for case in cases_of("smollm2", ["startup", "decode", "prefill"], [1, 8])]
    assert names == [
        "smollm2/decode/1",
        "smollm2/decode/8",
        "smollm2/prefill/1",
        "smollm2/prefill/8",
    ]


def test_a_document_has_eight_streams_beside_it() -> None:
    (case,) = cases_of("tiny", ["document"], [1, 64])
    assert case.concurrency == 8
    assert limits_for([case], threads=2).streams == 9


def test_a_shape_that_does_not_fit_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="smollm2 has no shape document"):
        cases_of("smollm2", ["document"], [1])


def test_limits_hold_every_case() -> None:
    cases = cases_of("tiny", ["decode", "prefill"], [4, 64])
    assert limits_for(cases, threads=2) == Limits(context=1024, streams=64, threads=2)
    assert SHAPES["tiny"]["prefill"].context <= 1024


def test_the_harness_never_loads_torch() -> None:
    program = "import sys, loadtest.peers.__main__, loadtest.peers.install; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
