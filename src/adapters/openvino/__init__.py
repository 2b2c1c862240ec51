"""OpenVINO behind the `InferenceBackend` port.

Two things have to be settled before its package is imported:

- Importing it reports that to its maker and leaves a client id in the home directory, unless its
  reporting package cannot be imported: it takes a stand-in without effect then. This server talks
  to nobody but its clients and the model hub.
- oneDNN, which it computes with, keeps 1024 kernels, and makes new ones for every new shape: about
  a megabyte for each length that a text can have. It reads how many to keep from the environment.
"""

import os
import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # not importable
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
