"""ONNX Runtime behind the `InferenceBackend` port.

Its Linux builds report usage to their maker unless told otherwise before they are loaded. This
server talks to nobody but its clients and the model hub.
"""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
