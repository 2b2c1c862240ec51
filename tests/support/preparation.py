"""Preparing a model for one engine or the other, and what became of it."""

import attrs
from bge_m3_server.adapters.models.prepare import Engine, prepare
from bge_m3_server.adapters.openvino.backend import OpenVinoSettings, load_openvino_backend
from bge_m3_server.adapters.openvino.ir import write_ir
from bge_m3_server.domain.fidelity import FLOORS
from bge_m3_server.domain.types import HeadProjections

from tests.support.preparable import ORT, SMALL

IMPOSSIBLE = attrs.evolve(FLOORS, dense_cosine_min=1.5)


@attrs.define
class Steps:
    """What a preparation told about its progress."""

    names: list[str] = attrs.field(factory=list)
    shares: list[float] = attrs.field(factory=list)

    def __call__(self, name, share):
        self.names.append(name)
        self.shares.append(share)


def prepared(source, cache, engine=ORT, **options):
    return prepare(source, engine, cache, Steps(), **options)


def kept(cache):
    """Directories of models below `cache`, those under construction included."""
    return sorted(path for path in (cache / "prepared").iterdir() if path.is_dir())


def to_ir(onnx_path):
    xml_path = onnx_path.with_suffix(".xml")
    write_ir(onnx_path, xml_path, {"bge_m3_server.attention_heads": str(SMALL.attention_heads)})
    onnx_path.with_name(f"{onnx_path.name}_data").unlink()
    onnx_path.unlink()
    return xml_path


OPENVINO = Engine(
    name="openvino",
    environment="version 1",
    is_fused=False,
    convert=to_ir,
    load=lambda graph: load_openvino_backend(
        graph, HeadProjections(), OpenVinoSettings(intra_threads=1)
    ),
)
