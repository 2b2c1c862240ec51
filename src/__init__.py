"""bge-m3-server: BGE-M3 dense, sparse and multi-vector embeddings over HTTP."""

__version__ = "0.1.0"
