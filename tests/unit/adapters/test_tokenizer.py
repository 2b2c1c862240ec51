import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.errors import ContractError, CorruptFileError
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIALS = ["<s>", "<pad>", "</s>", "<unk>"]
TEMPLATE = processors.TemplateProcessing(
    single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
)


def write_tokenizer(path, specials=SPECIALS, template=TEMPLATE):
    """A tokenizer of single words: `a` is 4, `b` is 5."""
    vocabulary = [(piece, 0.0) for piece in specials] + [("a", -1.0), ("b", -2.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=specials.index("<unk>")))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(specials)
    if template is not None:
        tokenizer.post_processor = template
    tokenizer.enable_padding(pad_id=1, pad_token="<pad>", length=16)
    tokenizer.enable_truncation(3)
    tokenizer.save(str(path))
    return path


@pytest.fixture
def file(tmp_path):
    return write_tokenizer(tmp_path / "tokenizer.json")


def ids(results):
    return [result.ids.tolist() for result in results]


def test_each_text_keeps_its_place_and_its_own_length(file):
    """Texts come back in order, with special tokens, and without the padding the file asks for."""
    results = load_tokenizer(file, 16).encode(["a b", "", "b"])
    assert ids(results) == [[0, 4, 5, 2], [0, 2], [0, 5, 2]]
    assert all(result.ids.dtype == np.int64 for result in results)


def test_no_texts(file):
    """No texts give no results."""
    assert load_tokenizer(file, 16).encode([]) == []


@pytest.mark.parametrize(
    ("text", "expected", "truncated"),
    [
        ("a b", [0, 4, 5, 2], False),
        ("a b a", [0, 4, 5, 4, 2], False),
        ("a b a b", [0, 4, 5, 4, 2], True),
        ("a " * 5000, [0, 4, 4, 4, 2], True),
    ],
    ids=["below", "at the limit", "one beyond", "far beyond"],
)
def test_truncation_is_told(file, text, expected, truncated):
    """A text is cut on the right to the limit, keeps `</s>`, and says so only if tokens went."""
    (result,) = load_tokenizer(file, 5).encode([text])
    assert (result.ids.tolist(), result.truncated) == (expected, truncated)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_smallest_limit_leaves_the_special_tokens(file, limit):
    """A limit without room for content cuts everything but `<s>` and `</s>`."""
    results = load_tokenizer(file, limit).encode(["a b", ""])
    assert ids(results) == [[0, 2], [0, 2]]
    assert [result.truncated for result in results] == [True, False]


def test_threads_share_one_tokenizer(file):
    """Calls from several threads at once give what single calls give."""
    tokenizer = load_tokenizer(file, 64)
    batches = [["a " * n + "b", "b " * n] for n in range(1, 80)]
    expected = [ids(tokenizer.encode(batch)) for batch in batches]
    with ThreadPoolExecutor(8) as pool:
        assert [ids(found) for found in pool.map(tokenizer.encode, batches)] == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"{}",
        lambda content: b"\xff" + content,
    ],
    ids=["cut", "empty", "no fields", "not UTF-8"],
)
def test_damaged_file_is_named(file, damage):
    """A file that is no tokenizer is refused by name."""
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        load_tokenizer(file, 16)


def test_damage_that_makes_the_library_panic_is_named(file):
    """A normalisation map that aborts the native parser is a corrupt file like any other."""
    content = json.loads(file.read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    file.write_text(json.dumps(content))
    with pytest.raises(CorruptFileError, match=r"tokenizer\.json"):
        load_tokenizer(file, 16)


def test_missing_file_is_named(tmp_path):
    """A file that is not there is refused by name."""
    with pytest.raises(CorruptFileError, match=r"absent\.json"):
        load_tokenizer(tmp_path / "absent.json", 16)


def test_other_special_ids_are_refused(tmp_path):
    """A vocabulary that numbers its special tokens otherwise belongs to another model."""
    file = write_tokenizer(tmp_path / "t.json", ["<pad>", "<s>", "</s>", "<unk>"])
    with pytest.raises(ContractError, match=r"t\.json.*'<s>': 1"):
        load_tokenizer(file, 16)


def test_tokenizer_without_special_tokens_around_a_text_is_refused(tmp_path):
    """A file that does not wrap texts in `<s>` and `</s>` is refused."""
    file = write_tokenizer(tmp_path / "t.json", template=None)
    with pytest.raises(ContractError, match=r"t\.json turns an empty text into \[\]"):
        load_tokenizer(file, 16)
