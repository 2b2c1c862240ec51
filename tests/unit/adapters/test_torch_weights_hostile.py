"""Head weights that somebody made to do harm: whatever else a pickle can hold is refused."""

import os
import pickle
import zipfile

import pytest
from bge_m3_server.adapters.models.torch_weights import read_linear
from bge_m3_server.domain.errors import ContractError, CorruptFileError, UnsafeWeightsError
from hypothesis import given
from hypothesis import strategies as st

from tests.support.linear_layer import BIAS, STORAGES, WEIGHT, with_weight, write_state
from tests.support.tiny_models import (
    ORDERED_DICT,
    integer,
    integers,
    state_dict_pickle,
    storage,
    tensor,
    text,
    write_torch_zip,
)


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
