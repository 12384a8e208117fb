"""Products with packed weights equal the plain ones, for any count of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from streamserve.errors import ConfigError  # noqa: E402
from streamserve.worker.models.cpu_product import cpu_product  # noqa: E402
from streamserve.worker.models.linear import Linear  # noqa: E402
from streamserve.worker.spec import WorkerSpec  # noqa: E402
from streamserve.worker.worker import Worker  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
# A product in bfloat16 keeps 8 bits.
TOLERANCE = 2**-6
# Either side of the size below which products are done in float32.
SHAPES = ((48, 40), (256, 256), (320, 256), (1000, 192))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_equals_the_plain_one(shape, has_bias):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).to(torch.bfloat16)
    bias = torch.randn(shape[0], generator=generator).to(torch.bfloat16) if has_bias else None
    product = cpu_product(weight, bias)
    if product is None:
        pytest.skip("this build of torch packs no weights")
    for num_rows in (1, 2, 7, 64, 600):
        x = torch.randn((num_rows, shape[1]), generator=generator).to(torch.bfloat16)
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        result = product(x)
        assert result.dtype is torch.bfloat16
        assert result.shape == exact.shape
        error = (result.double() - exact).abs() / exact.abs().clamp(min=1.0)
        assert error.max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_alone(dtype):
    assert cpu_product(torch.zeros((512, 512), dtype=dtype), None) is None
    projection = Linear(512, 512, has_bias=False, dtype=dtype, device=CPU)
    projection.weight.zero_()
    projection.pack()
    assert projection.weight.shape == (512, 512)
    assert projection(torch.ones((3, 512), dtype=dtype)).eq(0).all()


def test_a_packed_projection_keeps_no_second_copy_of_its_weight():
    projection = Linear(512, 256, has_bias=True, dtype=torch.bfloat16, device=CPU)
    projection.weight.fill_(0.25)
    assert projection.bias is not None
    projection.bias.fill_(2.0)
    x = torch.ones((1, 256), dtype=torch.bfloat16)
    before = projection(x)
    projection.pack()
    assert torch.equal(projection(x), before)
    is_packed = cpu_product(torch.zeros((512, 256), dtype=torch.bfloat16), None) is not None
    assert hasattr(projection, "weight") != is_packed


def test_an_operator_that_this_build_lacks_means_the_plain_product(monkeypatch):
    def absent(*arguments):
        raise NotImplementedError("reorder: needs a build with oneDNN")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", absent)
    assert cpu_product(torch.zeros((512, 512), dtype=torch.bfloat16), None) is None


def test_a_worker_gives_each_matrix_up_as_soon_as_it_is_packed(
    tmp_path: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model takes twice its memory while it is loaded."""
    outlived = []
    pack = Linear.pack

    def watched(projection: Linear) -> None:
        memory = StorageWeakRef(projection.weight.untyped_storage())
        pack(projection)
        if not hasattr(projection, "weight"):
            outlived.append(not memory.expired())

    monkeypatch.setattr(Linear, "pack", watched)
    folder = make_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=640)
    Worker(spec_for(folder, dtype="bfloat16")).start(lambda what, share: None)
    if not outlived:
        pytest.skip("this build of torch packs no weights")
    assert not any(outlived)


@pytest.mark.parametrize(("tied", "dtype"), [(True, "bfloat16"), (False, "bfloat16"), (True, "float32")])
def test_the_weights_are_counted_as_they_are_packed(
    tmp_path: Path, spec_for: Callable[..., WorkerSpec], tied: bool, dtype: str
) -> None:
    """Where the embedding is the output projection too, its packed form is a second one."""
    if cpu_product(torch.zeros((512, 512), dtype=torch.bfloat16), None) is None:
        pytest.skip("this build of torch packs no weights")
    sizes = {"hidden_size": 256, "head_dim": 128, "intermediate_size": 640, "num_hidden_layers": 1}
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=tied, **sizes)
    facts = Worker(spec_for(folder, dtype=dtype)).start(lambda what, share: None)
    matrices = 256 * (512 + 2 * 256 + 512 + 3 * 640)
    # A second one is there if it is packed, or a matrix of its own.
    embeddings = 512 * 256 * (1 if dtype == "float32" else 2)
    expected = (matrices + embeddings) * (4 if dtype == "float32" else 2)
    assert expected <= facts.weights_bytes < expected + 10_000


def test_what_is_packed_must_fit(
    tmp_path: Path, spec_for: Callable[..., WorkerSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    if cpu_product(torch.zeros((512, 512), dtype=torch.bfloat16), None) is None:
        pytest.skip("this build of torch packs no weights")
    folder = make_tiny_model(tmp_path / "model", tie_word_embeddings=True, hidden_size=256)
    spec = spec_for(folder, dtype="bfloat16")
    needed = Worker(spec).start(lambda what, share: None).weights_bytes
    monkeypatch.setattr("streamserve.worker.worker.free_bytes", lambda device: needed)
    Worker(spec).start(lambda what, share: None)
    monkeypatch.setattr("streamserve.worker.worker.free_bytes", lambda device: needed - 1)
    with pytest.raises(ConfigError, match=f"do not fit .* \\({needed} bytes, {needed - 1} free\\)"):
        Worker(spec).start(lambda what, share: None)


def test_small_matrices_are_kept_twice_as_wide() -> None:
    if cpu_product(torch.zeros((512, 512), dtype=torch.bfloat16), None) is None:
        pytest.skip("this build of torch packs no weights")
    projection = Linear(48, 40, has_bias=True, dtype=torch.bfloat16, device=CPU)
    assert projection.num_bytes(packed=False) == 2 * (48 * 40 + 48)
    assert projection.num_bytes(packed=True) == 4 * 48 * 40 + (2 + 4) * 48
    large = Linear(512, 512, has_bias=True, dtype=torch.bfloat16, device=CPU)
    assert large.num_bytes(packed=True) == large.num_bytes(packed=False)
