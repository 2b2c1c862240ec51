"""Reading head weights: what torch writes is read, and damaged or other files are refused."""

import contextlib
import pickle

import numpy as np
import pytest
from bge_m3_server.adapters.models.torch_weights import read_linear
from bge_m3_server.domain.errors import ContractError, CorruptFileError, UnsafeWeightsError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.linear_layer import BIAS, STORAGES, WEIGHT, write_state
from tests.support.tiny_models import (
    ORDERED_DICT,
    state_dict_pickle,
    tensor,
    text,
    write_linear,
    write_torch_zip,
)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_linear_layer_of_any_float_width_is_read(tmp_path, dtype):
    """Weight and bias come back as float32, whichever width they are stored in."""
    write_linear(tmp_path / "linear.pt", WEIGHT, BIAS, dtype)

    projection = read_linear(tmp_path / "linear.pt")

    assert projection.weight.dtype == projection.bias.dtype == np.float32
    np.testing.assert_array_equal(projection.weight, WEIGHT)
    np.testing.assert_array_equal(projection.bias, BIAS)


def test_bfloat16_is_widened(tmp_path):
    """bfloat16, which numpy lacks, is the upper half of a float32."""
    halves = {key: np.frombuffer(data, "<u2")[1::2].tobytes() for key, data in STORAGES.items()}
    items = (
        text("weight")
        + tensor(WEIGHT, "0", kind="BFloat16Storage")
        + text("bias")
        + tensor(BIAS, "1", kind="BFloat16Storage")
    )
    write_state(tmp_path / "linear.pt", items, halves)

    np.testing.assert_array_equal(read_linear(tmp_path / "linear.pt").weight, WEIGHT)


def test_views_of_one_storage_are_read(tmp_path):
    """A transposed weight and a bias with an offset may share their numbers."""
    shared = np.arange(8, dtype=np.float32)
    items = (
        text("weight")
        + tensor(shared, "0", shape=(2, 3), strides=(1, 2))
        + text("bias")
        + tensor(shared, "0", offset=6, shape=(2,), strides=(1,))
    )
    write_state(tmp_path / "linear.pt", items, {"0": shared.tobytes()})

    projection = read_linear(tmp_path / "linear.pt")

    np.testing.assert_array_equal(projection.weight, [[0, 2, 4], [1, 3, 5]])
    np.testing.assert_array_equal(projection.bias, [6, 7])


def test_parameters_and_newer_protocols_are_read(tmp_path):
    """A pickle of protocol 4 with Parameters in it, memoised as pickle does, is read too."""
    parameter = (
        b"\x8c\x0ctorch._utils\x94\x8c\x12_rebuild_parameter\x94\x93\x94"
        + tensor(WEIGHT, "0")
        + b"\x88"
        + ORDERED_DICT
        + b"\x87R"
    )
    pickled = b"\x80\x04}(" + text("weight") + parameter + text("bias") + tensor(BIAS, "1") + b"u."
    write_torch_zip(tmp_path / "linear.pt", pickled, STORAGES)

    np.testing.assert_array_equal(read_linear(tmp_path / "linear.pt").weight, WEIGHT)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "no zip"),
        (pickle.dumps(0x1950A86A20F9469CFC6C, 2) + b"\x80\x02M\xe9\x03.", "old torch file"),
    ],
    ids=["empty", "lfs pointer", "legacy"],
)
def test_other_formats_are_refused_by_name(tmp_path, content, told):
    """An empty file, a pointer file and a legacy torch file each get a message that fits."""
    (tmp_path / "linear.pt").write_bytes(content)

    with pytest.raises(UnsafeWeightsError, match=told):
        read_linear(tmp_path / "linear.pt")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_truncated_file_is_corrupt(tmp_path, share):
    """A file that stops early is called truncated, with the way out."""
    path = tmp_path / "linear.pt"
    write_linear(path, WEIGHT, BIAS)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])

    with pytest.raises(CorruptFileError, match=r"linear\.pt is truncated or damaged.*fetch"):
        read_linear(path)


def test_flipped_numbers_are_corrupt(tmp_path):
    """The archive's own checksum is honoured."""
    path = tmp_path / "linear.pt"
    write_linear(path, WEIGHT, BIAS, "float32")
    path.write_bytes(path.read_bytes().replace(WEIGHT.tobytes(), WEIGHT[::-1].tobytes()))

    with pytest.raises(CorruptFileError):
        read_linear(path)


def test_non_finite_weights_are_corrupt(tmp_path):
    """NaN in a trained layer is damage, found before it spreads into answers."""
    write_linear(tmp_path / "linear.pt", WEIGHT * np.nan, BIAS)

    with pytest.raises(CorruptFileError, match="NaN"):
        read_linear(tmp_path / "linear.pt")


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"weight": WEIGHT},
        {"weights": WEIGHT, "bias": BIAS},
        {"weight": BIAS, "bias": BIAS},
        {"weight": WEIGHT, "bias": WEIGHT},
        {"weight": WEIGHT.T.copy(), "bias": BIAS},
    ],
    ids=["nothing", "no bias", "other names", "flat weight", "matrix bias", "transposed"],
)
def test_other_state_dicts_break_the_contract(tmp_path, state):
    """Plain tensors that are no linear layer are refused with what was found."""
    storages = {str(index): array.tobytes() for index, array in enumerate(state.values())}
    write_torch_zip(tmp_path / "linear.pt", state_dict_pickle(state), storages)

    with pytest.raises(ContractError, match="linear layer"):
        read_linear(tmp_path / "linear.pt")


@given(data=st.data())
def test_no_damage_to_the_file_gets_through_as_another_error(tmp_path_factory, data):
    """Whatever byte of the archive changes, it is refused in the project's own words or read."""
    path = tmp_path_factory.getbasetemp() / "damaged.pt"
    write_linear(path, WEIGHT, BIAS)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(2, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)

    with contextlib.suppress(UnsafeWeightsError, ContractError, CorruptFileError):
        np.testing.assert_array_equal(read_linear(path).weight, WEIGHT)
