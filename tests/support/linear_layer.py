"""A linear layer of two rows, and torch files of it that can be wrong anywhere."""

import numpy as np

from tests.support.tiny_models import tensor, text, write_torch_zip

WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.array([0.5, -1.0], dtype=np.float32)
STORAGES = {"0": WEIGHT.tobytes(), "1": BIAS.tobytes()}


def write_state(path, items, storages=STORAGES):
    """A zip whose pickle is a dict of `items` (opcodes of keys and values)."""
    write_torch_zip(path, b"\x80\x02}(" + items + b"u.", storages)


def with_weight(opcodes):
    """The items of a linear layer whose weight is what `opcodes` make."""
    return text("weight") + opcodes + text("bias") + tensor(BIAS, "1")
