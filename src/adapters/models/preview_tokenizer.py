"""Builds the XLM-RoBERTa tokenizer, which BGE-M3 uses too, from its table of pieces."""

import io
from collections.abc import Sequence
from pathlib import Path

from sentencepiece import SentencePieceTrainer, sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from ...domain.types import Floats

_UNK_ID = 3
_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
_SILENT = 9
"""A log level above every message of SentencePiece."""


def write_tokenizer(pieces: Sequence[str], scores: Floats, path: Path) -> None:
    """Write a `tokenizer.json`.

    `pieces`: the vocabulary in id order, ``<mask>`` last; `scores`: their log-probabilities.
    """
    vocabulary = list(zip(pieces, scores.tolist(), strict=True))
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=_UNK_ID, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Precompiled(_nmt_nfkc_charsmap()),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
    )
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, normalized=False) for piece in _SPECIALS])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.save(str(path), pretty=False)


def _nmt_nfkc_charsmap() -> bytes:
    """SentencePiece's compiled `nmt_nfkc` rules: every model it trains carries a copy."""
    trained = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c"]),
        model_writer=trained,
        model_type="char",
        vocab_size=8,
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=_SILENT,
    )
    # protobuf makes the class at import time, out of mypy's sight
    message = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]
    charsmap: bytes = message.FromString(trained.getvalue()).normalizer_spec.precompiled_charsmap
    return charsmap
