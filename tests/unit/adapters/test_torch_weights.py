"""Reading head weights: what torch writes is read, whatever else a pickle can hold is refused."""

import contextlib
import os
import pickle
import zipfile

import numpy as np
import pytest
from bge_m3_server.adapters.models.torch_weights import read_linear
from bge_m3_server.domain.errors import ContractError, CorruptFileError, UnsafeWeightsError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_models import (
    ORDERED_DICT,
    integer,
    integers,
    state_dict_pickle,
    storage,
    tensor,
    text,
    write_linear,
    write_torch_zip,
)

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([0.5, -1.0], dtype=np.float32)
STORAGES = {"0": WEIGHT.tobytes(), "1": BIAS.tobytes()}


def write_state(path, items, storages=STORAGES):
    """A zip whose pickle is a dict of `items` (opcodes of keys and values)."""
    write_torch_zip(path, b"\x80\x02}(" + items + b"u.", storages)


def with_weight(opcodes):
    """The items of a linear layer whose weight is what `opcodes` make."""
    return text("weight") + opcodes + text("bias") + tensor(BIAS, "1")


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


class Shell:
    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Evaluation:
    def __init__(self, marker):
        self.code = f"open({str(marker)!r}, 'w').close()"

    def __reduce__(self):
        return eval, (self.code,)


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("hostile", [Shell, Evaluation])
@pytest.mark.parametrize("nested", [False, True])
def test_a_pickle_that_runs_code_is_refused_and_not_run(tmp_path, hostile, protocol, nested):
    """Whatever the protocol and the depth, code in a pickle is neither run nor accepted."""
    marker = tmp_path / "executed"
    value = {"weight": [{"deep": (hostile(marker),)}]} if nested else hostile(marker)
    write_torch_zip(tmp_path / "linear.pt", pickle.dumps(value, protocol), STORAGES)

    with pytest.raises(UnsafeWeightsError, match=r"linear\.pt was refused"):
        read_linear(tmp_path / "linear.pt")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("opcodes", "met"),
    [
        (b"cposix\nsystem\n(" + text("true") + b"tR", r"posix\.system"),
        (b"cbuiltins\neval\n(" + text("1") + b"tR", r"builtins\.eval"),
        (b"ctorch\nload\n(" + text("x") + b"tR", r"torch\.load"),
        (b"ctorch._utils\n_rebuild_tensor\n)R", r"torch\._utils\._rebuild_tensor"),
        (b"ccollections\nOrderedDict.fromkeys\n)R", "OrderedDict.fromkeys"),
        (b"ctorch\nLongStorage\n", "LongStorage"),
        (text("os") + text("system") + b"\x93", r"os\.system"),
        (b")" + text("system") + b"\x93", "global whose name is not text"),
        (b"}" + b"K\x01" + b"\x93", "global whose name is not text"),
        (b"(" + text("x") + b"cposix\nsystem\no", r"global posix\.system"),
        (b"(" + text("true") + b"iposix\nsystem\n", "opcode INST"),
        (ORDERED_DICT[:-2] + b")\x81", "opcode NEWOBJ"),
        (b"\x82\x01", "opcode EXT1"),
        (b"]", "opcode EMPTY_LIST"),
        (ORDERED_DICT[:-2] + b"(" + text("k") + b"\x85tR", "unusual call of"),
        (ORDERED_DICT[:-2] + text("x") + b"R", "call of something"),
        (text("system") + b")R", "call of something"),
        (ORDERED_DICT[:-2] + b"}b", "attributes set on a _Global"),
        (ORDERED_DICT[:-2] + text("k") + text("v") + b"s", "items set on a _Global"),
        (b"}(" + integer(1) + text("v") + b"u", "key that is a int"),
        (b"}(" + text("k") + b"u", "items set on a dict"),
        (text("storage") + b"Q", "persistent id"),
        (b"(" + text("module") + text("x") + b"tQ", "persistent id"),
        (storage("FloatStorage", "0", -1), "persistent id"),
        (
            b"("
            + text("storage")
            + ORDERED_DICT[:-2]
            + text("0")
            + text("cpu")
            + integer(6)
            + b"tQ",
            "persistent id",
        ),
        (text("a plain string"), "a str named 'weight'"),
        (storage("FloatStorage", "0", 6), "a PickledStorage named 'weight'"),
        (b"0", "opcode POP"),
        (b"h\x07", "not a well-formed pickle"),
        (b"\x87", "not a well-formed pickle"),
        (b"q\x01R", "call of something"),
        (b"\xff", "not a well-formed pickle"),
    ],
)
def test_anything_but_plain_tensors_is_refused_by_name(tmp_path, opcodes, met):
    """The message names the global, opcode or object that has no place in a state_dict."""
    write_state(tmp_path / "linear.pt", with_weight(opcodes))

    with pytest.raises(UnsafeWeightsError, match=met):
        read_linear(tmp_path / "linear.pt")


def test_a_memo_that_swaps_a_name_changes_nothing(tmp_path):
    """A known name kept in the memo and overwritten by another value calls nothing."""
    swapped = b"ccollections\nOrderedDict\nq\x01" + text("posix") + b"q\x01" + b"h\x01)R"
    write_state(tmp_path / "linear.pt", with_weight(swapped))

    with pytest.raises(UnsafeWeightsError, match="call of something"):
        read_linear(tmp_path / "linear.pt")


def test_tuples_that_double_forever_end_at_once(tmp_path):
    """A tuple of 2**60 leaves, built by doubling, is refused without being unfolded."""
    doubling = b")" + b"q\x00h\x00\x86" * 60
    write_state(tmp_path / "linear.pt", with_weight(doubling))
    with pytest.raises(UnsafeWeightsError, match="tuple named 'weight'"):
        read_linear(tmp_path / "linear.pt")

    write_state(tmp_path / "linear.pt", with_weight(doubling + b"Q"))
    with pytest.raises(UnsafeWeightsError, match="persistent id"):
        read_linear(tmp_path / "linear.pt")

    write_state(tmp_path / "linear.pt", with_weight(text("os") + doubling + b"\x93"))
    with pytest.raises(UnsafeWeightsError, match="not text"):
        read_linear(tmp_path / "linear.pt")


@pytest.mark.parametrize(
    "departure",
    [
        {"offset": 1},
        {"offset": 2**62},
        {"shape": (2, 4), "strides": (4, 1)},
        {"strides": (4, 1)},
        {"strides": (2**40, 1)},
        {"shape": (2**40, 2**20), "strides": (0, 0)},
        {"shape": (3, 3), "strides": (0, 1)},
        {"elements": 7},
        {"elements": 5},
        {"elements": 2**40},
        {"kind": "HalfStorage"},
        {"kind": "DoubleStorage"},
    ],
    ids=str,
)
def test_a_tensor_stays_within_its_storage(tmp_path, departure):
    """Shapes, strides, offsets and sizes that point past the numbers in the file are refused."""
    write_state(tmp_path / "linear.pt", with_weight(tensor(WEIGHT, "0", **departure)))

    with pytest.raises(UnsafeWeightsError, match=r"leaves its storage|elements need"):
        read_linear(tmp_path / "linear.pt")


@pytest.mark.parametrize(
    "departure",
    [
        {"offset": -1},
        {"strides": (-3, 1)},
        {"shape": (-2, 3)},
        {"shape": (0, 3)},
        {"shape": (2, 3, 1)},
    ],
    ids=str,
)
def test_a_tensor_without_sense_is_refused(tmp_path, departure):
    """Negative or missing sizes never reach numpy."""
    write_state(tmp_path / "linear.pt", with_weight(tensor(WEIGHT, "0", **departure)))

    with pytest.raises(UnsafeWeightsError, match="make no sense"):
        read_linear(tmp_path / "linear.pt")


def test_a_missing_storage_is_refused(tmp_path):
    """A tensor whose numbers are not in the file is named by its record."""
    write_state(tmp_path / "linear.pt", with_weight(tensor(WEIGHT, "9")))

    with pytest.raises(UnsafeWeightsError, match="0 records named data/9"):
        read_linear(tmp_path / "linear.pt")


def test_a_compressed_archive_is_refused(tmp_path):
    """Torch never compresses; a record that could unfold to gigabytes is not opened."""
    with zipfile.ZipFile(tmp_path / "linear.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("linear/data.pkl", bytes(1 << 20))

    with pytest.raises(UnsafeWeightsError, match="is compressed or encrypted"):
        read_linear(tmp_path / "linear.pt")


def test_an_oversized_pickle_is_refused(tmp_path):
    """A description of two tensors does not take a mebibyte."""
    write_torch_zip(tmp_path / "linear.pt", bytes((1 << 20) + 1), STORAGES)

    with pytest.raises(UnsafeWeightsError, match="more than 1048576"):
        read_linear(tmp_path / "linear.pt")


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


def test_an_escape_in_a_damaged_string_is_refused_without_a_warning(tmp_path):
    """The scan of a hostile pickle prints nothing of its own."""
    pickled = bytearray(state_dict_pickle({"weight": WEIGHT, "bias": BIAS}))
    pickled[3] = ord("\\")
    write_torch_zip(tmp_path / "linear.pt", bytes(pickled), STORAGES)

    with pytest.raises(UnsafeWeightsError):
        read_linear(tmp_path / "linear.pt")


@given(data=st.data())
def test_no_damage_to_the_pickle_gets_through_as_another_error(tmp_path_factory, data):
    """Any bytes in place of the pickle's end in the project's own errors, or in a right read."""
    pickled = bytearray(state_dict_pickle({"weight": WEIGHT, "bias": BIAS}))
    for _ in range(data.draw(st.integers(1, 4))):
        pickled[data.draw(st.integers(0, len(pickled) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "fuzzed.pt"
    write_torch_zip(path, bytes(pickled), STORAGES)

    try:
        projection = read_linear(path)
    except (UnsafeWeightsError, ContractError, CorruptFileError):
        return
    assert projection.weight.shape[0] == projection.bias.shape[0]


def test_integers_beyond_64_bits_are_bounded_like_others(tmp_path):
    """Python's endless integers do not wrap around on their way to numpy."""
    huge = tensor(WEIGHT, "0").replace(integers((3, 1)), integers((2**200, 1)))
    write_state(tmp_path / "linear.pt", with_weight(huge))

    with pytest.raises(UnsafeWeightsError, match="leaves its storage"):
        read_linear(tmp_path / "linear.pt")
