"""OpenVINO behind the `InferenceBackend` port.

Importing its package reports that to its maker and leaves a client id in the home directory, unless
its reporting package cannot be imported: it takes a stand-in without effect then. This server talks
to nobody but its clients and the model hub.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # not importable
