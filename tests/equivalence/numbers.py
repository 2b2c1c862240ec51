"""The file in which FlagEmbedding's numbers travel from its environment to the tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@attrs.frozen(eq=False)
class Numbers:
    """What `BGEM3FlagModel.encode` returned for some texts.

    `texts`: the texts themselves.
    `dense`: (texts, hidden) float32.
    `sparse`: vocabulary id → weight of each text.
    `colbert`: (tokens - 1, hidden) float32 of each text; None where it was not kept.
    """

    texts: Sequence[str]
    dense: Floats
    sparse: Sequence[Mapping[int, float]]
    colbert: Sequence[Floats | None]

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, places: Sequence[int]) -> "Numbers":
        """Only the texts at `places`."""
        return Numbers(
            texts=[self.texts[place] for place in places],
            dense=self.dense[list(places)],
            sparse=[self.sparse[place] for place in places],
            colbert=[self.colbert[place] for place in places],
        )

    def save(self, path: Path) -> None:
        """Write one compressed .npz without pickles."""
        encoded = [text.encode() for text in self.texts]
        hidden = self.dense.shape[1]
        vectors = [v for v in self.colbert if v is not None]
        np.savez_compressed(
            path,
            texts=np.frombuffer(b"".join(encoded), np.uint8),
            text_sizes=np.array([len(text) for text in encoded]),
            dense=self.dense,
            sparse_ids=np.array([i for weights in self.sparse for i in weights], np.int64),
            sparse_weights=np.array(
                [w for weights in self.sparse for w in weights.values()], np.float32
            ),
            sparse_sizes=np.array([len(weights) for weights in self.sparse]),
            colbert=np.concatenate([np.zeros((0, hidden), np.float32), *vectors]),
            colbert_sizes=np.array([-1 if v is None else len(v) for v in self.colbert]),
        )

    @classmethod
    def load(cls, path: Path) -> "Numbers":
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            text_ends = np.cumsum(arrays["text_sizes"])
            blob = arrays["texts"].tobytes()
            ids = _split(arrays["sparse_ids"], arrays["sparse_sizes"])
            weights = _split(arrays["sparse_weights"], arrays["sparse_sizes"])
            sizes = arrays["colbert_sizes"]
            vectors = _split(arrays["colbert"], np.maximum(sizes, 0))
            return cls(
                texts=[
                    blob[end - size : end].decode()
                    for end, size in zip(text_ends, arrays["text_sizes"], strict=True)
                ],
                dense=arrays["dense"],
                sparse=[
                    dict(zip(i.tolist(), w.tolist(), strict=True))
                    for i, w in zip(ids, weights, strict=True)
                ],
                colbert=[None if size < 0 else v for size, v in zip(sizes, vectors, strict=True)],
            )


def _split(values: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    return np.split(values, np.cumsum(sizes)[:-1]) if len(sizes) else []
